"""What a check-up finds on this machine: versions, Slurm, disk, quotas, limits."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from hpcddp.attempt.nodes import machine
from hpcddp.doctor import collectives_library, diagnosis, quotas
from hpcddp.doctor.check_finding import ERROR, WARNING, CheckFinding
from hpcddp.errors import SlurmUnreachable
from hpcddp.slurm import rules, sbatch

PYTHON = (3, 11)  # the oldest that is served
NONE = "not installed"
BUILDS = {"cuda": "CUDA", "hip": "ROCm"}  # of torch, as its version.py names them


class Here(NamedTuple):
    """This machine.

    Args:
        rows: name and value of each fact, for people.
        versions: of what the nodes must have too, as in a row of their results.
    """

    rows: list[tuple[str, str]]
    findings: list[CheckFinding]
    versions: Mapping[str, str]


def check(runs: Path) -> Here:
    """Check this machine. torch is not imported: that may take minutes on a login node.

    Args:
        runs: the folder of the runs, which may be missing.
    """
    packages = {name: _version(name) for name in ("hpcddp", "torch", "submitit")}
    rows = [("Python", f"{sys.version.split()[0]} ({sys.executable})")]
    rows += [(name, text) for name, text in packages.items() if name != "torch"]
    rows += _torch(packages["torch"])
    slurm, findings = _slurm()
    rows.append(("Slurm", slurm))
    folder = next(path for path in (runs, *runs.parents) if path.exists())
    facts = machine.read(folder)
    rows.append(("runs", f"{folder}: {_free(facts['folder'])}"))
    limits = quotas.read(folder)
    rows += [("quota", "; ".join(map(str, limits)))] if limits else []
    findings += [
        *_packages(packages),
        *quotas.findings(limits),
        *diagnosis.space("here", "the runs folder", facts["folder"]),
        *diagnosis.open_files("here", facts["open_files"]),
    ]
    versions = {"python": str(facts["python"]), "torch": packages["torch"]}
    return Here(rows, findings, {n: text for n, text in versions.items() if text != NONE})


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return NONE


def _torch(installed: str) -> Iterator[tuple[str, str]]:
    """torch's version and what it was built for, from its files, and the library of its
    collectives."""
    spec = find_spec("torch") if installed != NONE else None
    folder = Path(spec.origin).parent if spec and spec.origin else None
    kind, number = _built_for(folder) if folder else ("", "")
    if folder is None or not kind:
        yield "torch", installed if folder is None else f"{installed}, CPU only"
        return
    library = collectives_library.text(kind, folder)
    yield "torch", f"{installed}, {BUILDS[kind]} {number}, {library}"
    plugins = collectives_library.plugins(kind, folder, os.environ)
    none = f"none here; {library.split()[0]} does without"
    yield "net plugin", ", ".join(plugins) or none


def _built_for(folder: Path) -> tuple[str, str]:
    """cuda or hip, and its version; ("", "") for CPUs alone."""
    names: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in (folder / "version.py").read_text(encoding="utf-8").splitlines():
            name, equals, value = line.partition("=")
            if equals:
                names[name.partition(":")[0].strip()] = value.strip().strip("'\"")
    return next(((kind, names[kind]) for kind in BUILDS if names.get(kind, "None") != "None"),
                ("", ""))  # fmt: skip


def _free(disk: Mapping[str, int]) -> str:
    from hpcddp.sizes import size

    if not disk:
        return "unknown"
    files = f", room for {disk['free_files']} files" if disk["files"] else ""
    return f"{size(disk['free'])} free{files}"


def _slurm() -> tuple[str, list[CheckFinding]]:
    """Slurm's version, if it answers."""
    if not sbatch.answers():
        return "not found", []
    try:
        text = rules.config().get("SLURM_VERSION", "unknown")
    except SlurmUnreachable as error:
        hint = "try again, or ask your administrators whether Slurm is down"
        return "no answer", [
            CheckFinding(ERROR, "here", f"Slurm does not answer: {error.what}", hint)
        ]
    return text, []


def _packages(packages: Mapping[str, str]) -> Iterator[CheckFinding]:
    """Packages that are missing, and a Python that is too old."""
    if sys.version_info < PYTHON:
        what = f"Python {sys.version.split()[0]} is older than {PYTHON[0]}.{PYTHON[1]}"
        yield CheckFinding(ERROR, "here", what, "use a newer Python")
    if packages["torch"] == NONE:
        hint = "install it in this environment, or name the nodes' one in the profile's [software]"
        yield CheckFinding(WARNING, "here", "torch is not installed in this Python", hint)
