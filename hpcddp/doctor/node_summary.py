"""What a check-up's job read of the nodes: a table for people, and facts for later commands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcddp.planning.site.site_facts import CheckUp
from hpcddp.sizes import counted

HEAD = ("NODE", "GPUS", "DRIVER", "INTERFACE", "IMPORT", "WRITE", "CLOCK")
Measurements = Mapping[str, Any]  # the results of a check-up, or a part of them


def table(results: Measurements) -> Iterator[tuple[str, ...]]:
    """A row for each node: its GPUs, the interface on the way to the first node, the longest import
    of torch, the time to write a small file, and how far its clock is ahead; last, this machine."""
    rows: Sequence[Measurements] = results["ranks"]
    for head in (row for row in rows if "host" in row):
        own = [row for row in rows if row["node"] == head["node"]]
        clock = max((float(row["clock"]) for row in own), key=abs)
        yield (
            str(head["host"]),
            _gpus(head["gpus"]),
            ", ".join(drivers([head])) or "-",
            str(head.get("interface") or head["address"] or "-"),
            f"{max(float(row['import_seconds']) for row in own):.3g} s",
            f"{head['writes']['median'] * 1e3:.3g} ms" if head["writes"] else "-",
            f"{clock:+.2g} s",
        )
    if "here" in results:
        yield ("here", *["-"] * (len(HEAD) - 2), f"{results['here']['clock']:+.2g} s")


def _gpus(gpus: Sequence[Measurements]) -> str:
    names = dict.fromkeys(str(gpu.get("name", "GPU")) for gpu in gpus)
    return f"{len(gpus)} {', '.join(names)}" if gpus else "-"


def drivers(heads: Sequence[Measurements]) -> list[str]:
    """The versions of the GPU driver on some nodes."""
    return sorted({str(gpu["driver"]) for head in heads for gpu in head["gpus"] if "driver" in gpu})


def facts(results: Measurements) -> str:
    """What only a node can tell, in one line."""
    rows: Sequence[Measurements] = results["ranks"]
    heads = [row for row in rows if "host" in row]
    words = {
        "interface": {str(row.get("interface", "")) for row in heads},
        "GPU driver": set(drivers(heads)),
        "libc": {str(row["libc"]) for row in heads},
        "CPUs": {str(row["architecture"]) for row in heads},
    }
    texts = [f"{name} {' or '.join(sorted(values - {''}))}" for name, values in words.items()
             if values - {""}]  # fmt: skip
    homes = "see $HOME" if all(row["home"] for row in heads) else "do not all see $HOME"
    runs = "see" if all(row["visible"] is not None for row in rows) else "do not all see"
    return f"{', '.join(texts)}; {counted(len(heads), 'node')}: {runs} the runs, {homes}"


def check_up(results: Measurements, runs: Path, python: str) -> CheckUp:
    """What later commands should know. A home folder that only some nodes lack is their own fault.

    Args:
        runs: the folder of the runs.
        python: of the ranks, as software_facts.place names it.
    """
    rows: Sequence[Measurements] = results["ranks"]
    homes = [row["home"] for row in rows if "host" in row]
    seen = {Path.home(): any(homes), runs: all(row["visible"] is not None for row in rows)}
    imports = {python: max(float(row["import_seconds"]) for row in rows)}
    return CheckUp(results["time"], seen, facts(results), imports)
