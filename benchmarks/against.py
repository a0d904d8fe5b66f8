"""python -m benchmarks --against COMMIT NAME...: this checkout beside another commit.

The other commit gets its own worktree and environment. Both sides run their own benchmarks in turn,
with a new process for each measurement. So both have the same overhead, and neither needs the
other's code. The other commit takes the place of the benchmarks' floors.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import Row
from hpcddp.errors import HpcddpError

CHECKOUT = Path(__file__).parents[1]
LIMIT = 1.02
LEAST = 15  # pairs

Figures = dict[str, dict[str, Any]]
"""The figures of one measurement: name of a row -> the row as its side writes it."""


def rows(commit: str, names: Sequence[str], pairs: int) -> list[Row]:
    """The rows that both sides have.

    Raises:
        HpcddpError: the commit is unknown, its environment cannot be made, or a benchmark failed.
    """
    with worktree(commit) as other:
        return in_turn(CHECKOUT, other, names, pairs)


def in_turn(ours: Path, theirs: Path, names: Sequence[str], pairs: int) -> list[Row]:
    """Measure two checkouts in turn. Each has its environment in `.venv`."""
    taken: dict[Path, list[Figures]] = {ours: [], theirs: []}
    for number in range(pairs):
        sides = (ours, theirs) if number % 2 == 0 else (theirs, ours)
        for side in sides:
            taken[side].append(take(side, names))
        print(f"\r{number + 1} of {pairs}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    first = taken[ours][0]
    both = [name for name in first if all(name in one for one in taken[theirs])]
    return [
        Row(
            name,
            [one[name]["ours"][0] for one in taken[ours]],
            [one[name]["ours"][0] for one in taken[theirs]],
            unit=first[name]["unit"],
            ratio_limit=LIMIT
            if first[name]["unit"]
            else None,  # for a plain number, neither direction is worse
            ratio_least=1 / LIMIT if first[name]["ratio_least"] else None,
            apart=True,
        )
        for name in both
    ]


def take(side: Path, names: Sequence[str]) -> Figures:
    """The figures of one run of a side's benchmarks."""
    with tempfile.TemporaryDirectory(prefix="hpcddp-against-") as folder:
        path = Path(folder, "figures.json")
        words = ["-m", "benchmarks", *names, "--pairs", "1", "--json", str(path)]
        try:
            done = subprocess.run(
                [side / ".venv/bin/python", *words],
                cwd=side, capture_output=True, text=True, check=False,
            )  # fmt: skip
        except OSError as error:
            hint = "make it with scripts/install"
            what = f"cannot run its Python: {error}"
            raise HpcddpError(what, where=str(side), hint=hint) from None
        if not path.exists() or "NOT MEASURED" in done.stdout:
            said = (done.stdout + done.stderr).strip()
            raise HpcddpError("the benchmarks failed", where=str(side), hint=said)
        found = json.loads(path.read_text())["rows"]
    return {row["name"]: row for row in found}


@contextlib.contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """A checkout of a commit, with its environment."""
    with tempfile.TemporaryDirectory(prefix="hpcddp-against-") as folder:
        path = Path(folder, "checkout")
        _run("git", "worktree", "add", "--detach", str(path), commit)
        try:
            print(f"making an environment for {commit} ...", file=sys.stderr)
            _run(str(path / "scripts/install"), "examples,test")
            yield path
        finally:
            _run("git", "worktree", "remove", "--force", str(path))


def _run(*argv: str) -> None:
    done = subprocess.run(argv, cwd=CHECKOUT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise HpcddpError(f"{argv[0]} failed", where=" ".join(argv), hint=done.stderr.strip())
