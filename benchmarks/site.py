"""The site of a benchmark: a temporary folder, a clean environment, and a Slurm on request."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path

from benchmarks.measure import Take, interleave
from hpcddp.errors import HpcddpError
from hpcddp.sandbox.cluster import Sandbox, Settings
from hpcddp.sandbox.own_processes import tail
from hpcddp.slurm.commands import LIVE
from hpcddp.slurm.environment import clean

PYTHON = sys.executable
HPCDDP = str(Path(PYTHON).with_name("hpcddp"))
JOB_SECONDS = 180.0


class Site:
    """The site of one run of the benchmarks; a context manager that removes everything at its end.

    Args:
        pairs: number of measurements of each subject.
    """

    def __init__(self, pairs: int) -> None:
        self.pairs = pairs
        self.environ = _environ()
        self._stack = ExitStack()

    def __enter__(self) -> Site:
        made = tempfile.TemporaryDirectory(prefix="hpcddp-benchmarks-")
        self.folder = Path(self._stack.enter_context(made))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def fresh(self) -> Path:
        """Make a new empty folder."""
        return Path(tempfile.mkdtemp(dir=self.folder))

    def interleave(self, name: str, *takes: Take) -> list[list[float]]:
        """Measure the subjects in turn; print the progress to stderr."""

        def show(number: int) -> None:
            end = "\n" if number == self.pairs else ""
            print(f"\r{name}: {number} of {self.pairs}", end=end, file=sys.stderr, flush=True)

        return interleave(takes, self.pairs, show)

    @cached_property
    def slurm(self) -> dict[str, str]:
        """The environment of programs on our own Slurm, which is started at the first use.

        Raises:
            SandboxError: this machine cannot run it.
        """
        sandbox = Sandbox(self.folder / "slurm")
        self._stack.callback(sandbox.down)
        sandbox.up(Settings(nodes=2, gpus=4, cpus=4, accounting=False))
        return self.environ | sandbox.environ()

    def wait(self, job_id: str) -> None:
        """Wait until a Slurm job has completed. It asks twice a second: the ranks need the CPUs."""
        deadline = time.monotonic() + JOB_SECONDS
        state = "PENDING"
        while state in LIVE:
            if time.monotonic() > deadline:
                raise HpcddpError(f"job {job_id} is still {state} after {JOB_SECONDS:.0f} s")
            time.sleep(0.5)
            state = self.slurm_says("squeue", "--noheader", "--states=all", "--format=%T",
                                    f"--jobs={job_id}")  # fmt: skip
        if state != "COMPLETED":
            raise HpcddpError(f"job {job_id} ended as {state}", hint=self._log(job_id))

    def _log(self, job_id: str) -> str:
        """The last lines of a job's output."""
        facts = self.slurm_says("scontrol", "--oneliner", "show", "job", job_id).split()
        paths = [Path(fact[len("StdOut=") :]) for fact in facts if fact.startswith("StdOut=")]
        return "".join(tail(path, 20) for path in paths)

    def slurm_says(self, *argv: str) -> str:
        """Run a program of our Slurm; return its output."""
        return output(argv, self.slurm, self.folder)


def _environ() -> dict[str, str]:
    """This environment without variables of another Slurm or run, and with byte code.

    An installed package has byte code; a fresh checkout would be compiled in every process.
    """
    foreign = ("SLURM", "HPCDDP_", "PYTHON", "OMP_")
    kept = clean(os.environ).items()
    return {name: value for name, value in kept if not name.startswith(foreign)}


def output(argv: Sequence[str], environ: Mapping[str, str], folder: Path) -> str:
    """Run a program, and return its output; HpcddpError with its stderr if it fails."""
    done = subprocess.run(
        argv, env=environ, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        raise HpcddpError(f"{argv[0]}: exit code {done.returncode}", hint=done.stderr.strip())
    return done.stdout.strip()


def wall(argv: Sequence[str], environ: Mapping[str, str], folder: Path) -> float:
    """Seconds of a whole process, from before its start to after its end."""
    began = time.perf_counter()
    output(argv, environ, folder)
    return time.perf_counter() - began
