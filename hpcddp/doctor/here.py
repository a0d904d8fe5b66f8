"""What a check-up finds on this machine: versions, Slurm, disk, limits."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from hpcddp.attempt.nodes import machine
from hpcddp.doctor import diagnosis
from hpcddp.doctor.check_finding import ERROR, WARNING, CheckFinding
from hpcddp.errors import SlurmUnreachable
from hpcddp.slurm import rules, sbatch

PYTHON = (3, 11)  # the oldest that is served
NONE = "not installed"


class Here(NamedTuple):
    """This machine.

    Args:
        rows: name and value of each fact, for people.
    """

    rows: list[tuple[str, str]]
    findings: list[CheckFinding]


def check(runs: Path) -> Here:
    """Check this machine. torch is not imported: that may take minutes on a login node.

    Args:
        runs: the folder of the runs, which may be missing.
    """
    packages = {name: _version(name) for name in ("hpcddp", "torch", "submitit")}
    rows = [("Python", f"{sys.version.split()[0]} ({sys.executable})")]
    rows += [(name, text) for name, text in packages.items() if name != "torch"]
    rows.append(("torch", _torch(packages["torch"])))
    slurm, findings = _slurm()
    rows.append(("Slurm", slurm))
    folder = next(path for path in (runs, *runs.parents) if path.exists())
    facts = machine.read(folder)
    rows.append(("runs", f"{folder}: {_free(facts['folder'])}"))
    findings += [
        *_packages(packages),
        *diagnosis.space("here", "the runs folder", facts["folder"]),
        *diagnosis.open_files("here", facts["open_files"]),
    ]
    return Here(rows, findings)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return NONE


def _torch(installed: str) -> str:
    """torch's version and what it was built for, from its files."""
    spec = find_spec("torch") if installed != NONE else None
    if spec is None or not spec.origin:
        return installed
    names: dict[str, str] = {}
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return installed
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if equals:
            names[name.partition(":")[0].strip()] = value.strip().strip("'\"")
    for name, word in (("cuda", "CUDA"), ("hip", "ROCm")):
        if names.get(name, "None") != "None":
            return f"{installed}, {word} {names[name]}{_nccl(name)}"
    return f"{installed}, CPU only"


def _nccl(kind: str) -> str:
    """The version of the NCCL package beside a CUDA build."""
    for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12") if kind == "cuda" else ():
        if (text := _version(name)) != NONE:
            return f", NCCL {text}"
    return ""


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
