"""A user's own folder on a machine where only a test's own Slurm answers, and runs in it."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcddp import record
from hpcddp.planning import jobfile, plan
from hpcddp.planning.asked import Asked
from hpcddp.planning.earlier_runs import Measured
from hpcddp.planning.jobfile import Layer
from hpcddp.planning.plan import Plan
from hpcddp.record import JobRecord
from hpcddp.rundir import RunDir

CHECKOUT = Path(__file__).parents[2]
SUPPORT = Path(__file__).parent
COMMAND = Path(sys.executable).with_name("hpcddp")
TASK = 'raise RuntimeError("the command line imported the task")\n'
FOREIGN = (
    "HPCDDP_",
    "PYTHONUNBUFFERED",
    "SLURM_",
    "SBATCH_",
    "SQUEUE_",
    "SINFO_",
    "SCANCEL_",
    "NO_COLOR",
    "COLUMNS",
)
# Values that a shell, sbatch or jinja would like to make something of.
NASTY = [
    "a b", "it's", 'say "hi"', "$(touch x)", "`touch x`", "; touch x", "50%", "a/b", "größe 数",
    "\\", "!x", "*", "-n", "", "#SBATCH --x", "$HOME", "&& touch x", "{{ 7 }}", "~",
]  # fmt: skip
TOOLS = (
    "bash",
    "cat",
    "echo",
    "env",
    "grep",
    "head",
    "sleep",
    "timeout",
    "touch",
    "printf",
    "setsid",
)


def nodes(*rows: tuple[str, int, str]) -> str:
    """A sinfo that has nodes of these partitions, CPUs and generic resources, two of each."""
    lines = (f"{name}|idle|2|{cpus}|2|64000|{gres}|(null)|n[1-2]" for name, cpus, gres in rows)
    return "\n".join(f"echo '{line}'" for line in lines)


def flags(*pairs: tuple[str, Any], where: str = "--set") -> Layer:
    """A layer with these values."""
    layer = Layer()
    for name, value in pairs:
        layer.put(name, value, where)
    return layer


def record_run(
    run: RunDir,
    nodes: tuple[int, int] = (1, 2),
    gpus: int = 4,
    backend: str = "slurm",
    **more: Any,
) -> RunDir:
    """Give a run its job.json."""
    facts: dict[str, Any] = {"spec": {}, "workdir": str(run.path.parent), "created": 5.0}
    facts |= {"nodes": list(nodes), "gpus_per_node": gpus, "backend": backend}
    record.write(run, JobRecord(run.name, **facts | more))
    return run


@dataclass(frozen=True)
class Outcome:
    """What a command left: its exit code and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err


class Site:
    """A user's folder with one small job, on a machine where only a test's own Slurm answers."""

    def __init__(self, path: Path) -> None:
        self.folder = path / "work"
        self.runs = self.folder / "runs"
        self.bin = path / "bin"
        self.config = path / "config"
        for folder in (self.folder / "jobs", self.bin, self.config):
            folder.mkdir(parents=True)
        for tool in TOOLS:
            (self.bin / tool).symlink_to(next(Path(p, tool) for p in ("/usr/bin", "/bin")))
        self.job("toy", "global_batch = 96\nepochs = 1\n")

    def job(self, name: str, text: str, task: str = TASK) -> Path:
        """A job file, with its task beside it."""
        path = self.folder / "jobs" / f"{name}.toml"
        path.write_text(text, encoding="utf-8")
        path.with_suffix(".py").write_text(task)
        return path

    def write(self, name: str, text: str) -> Path:
        """A file in the user's folder."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def profile(self, name: str, text: str) -> Path:
        """A cluster profile of the user's own."""
        path = self.config / "hpcddp" / "clusters" / f"{name}.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def program(self, name: str, text: str) -> None:
        """A small shell program on PATH."""
        path = self.bin / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)

    def slurm(self, **answers: str) -> None:
        """A Slurm that takes every job, and answers as told."""
        programs = {
            "sbatch": "case $1 in --version) exit 0;; --test-only) cat >/dev/null; "
            "echo 'sbatch: Job 9 to start' >&2; exit;; esac; echo 'Submitted batch job 42'",
            "srun": "exit 0",
            "squeue": "exit 0",
            "sinfo": nodes(("gpu*", 32, "gpu:4")),
            "scancel": 'echo "$*" >>cancelled',
        }
        for name, text in (programs | answers).items():
            self.program(name, text)

    def plan(
        self, layer: Layer | None = None, job: str | None = "toy", notes: Sequence[str] = (),
        measured: Measured | None = None, runs: Path | None = None,
    ) -> Plan:  # fmt: skip
        """The checked plan of a job under one layer of flags; on Slurm if it says nothing."""
        flags = layer or Layer()
        if "cluster" not in flags.values:
            flags.put("cluster", "slurm", "--cluster")
        layers, more = jobfile.load(job, flags, os.environ, self.folder)
        asked = Asked.read(layers, [*notes, *more], os.environ)
        facts = {"measured": measured, "runs": runs}
        return plan.make(asked, environ=os.environ, folder=self.folder, **facts)
