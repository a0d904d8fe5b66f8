"""A user's folder and his command line on the sandbox, with a small job in it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import run_states
from toy import TOY

from hpcddp.attempt import ledger
from hpcddp.attempt.ledger import Attempt
from hpcddp.rundir import RunDir, read_lines
from hpcddp.sandbox.cluster import Sandbox

PATIENCE = 400.0  # seconds: other tests train on the same two cores
HPCDDP = str(Path(sys.executable).with_name("hpcddp"))


@dataclass(frozen=True)
class Slurm:
    """The sandbox as a test sees it."""

    sandbox: Sandbox
    environ: dict[str, str]

    def run(self, *argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """A program on this Slurm; its exit code is the caller's to look at, unless check=True."""
        defaults: dict[str, Any] = {"env": self.environ, "timeout": 60, "check": False}
        return subprocess.run(argv, capture_output=True, text=True, **(defaults | options))


@dataclass
class Desk:
    """A user's folder, and his command line on the sandbox."""

    folder: Path
    slurm: Slurm

    @property
    def nodes(self) -> list[str]:
        return self.slurm.sandbox.nodes

    def hosts(self, count: int) -> str:
        """The first nodes as Slurm writes them."""
        return self.nodes[0][:-1] + f"[1-{count}]"

    def __call__(self, *args: str, code: int | None = 0, text: str = "") -> str:
        """`hpcddp ARGS`; its stdout. The exit code must be `code`, unless that is None."""
        done = self.result(*args, text=text)
        assert code is None or done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def result(self, *args: str, text: str = "") -> subprocess.CompletedProcess[str]:
        return self.slurm.run(HPCDDP, *args, cwd=self.folder, timeout=120, input=text)

    def status(self, run: str = "last") -> dict[str, Any]:
        """What is known of a run; stale where Slurm did not answer."""
        environ = self.slurm.environ
        root = Path(environ.get("HPCDDP_RUNS") or self.folder / "runs")
        return run_states.states(environ).of(root, run)

    def until(self, good: Callable[[dict[str, Any]], bool], run: str = "last") -> dict[str, Any]:
        """Wait until the status of a run is good."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            found = self.status(run)
            if not found["stale"] and good(found):
                return found
            time.sleep(0.5)
        raise AssertionError(f"never so: {found}\n{self('logs', run)}")

    def submit(self, *args: str) -> str:
        """Submit without waiting; the run's name."""
        line = json.loads(self("submit", "toy", *args, "--json").splitlines()[0])
        return str(line["run"])

    def render(self, *args: str) -> RunDir:
        """A run with a script for plain sbatch."""
        line = next(x for x in self("render", "toy", *args).splitlines() if "readonly RUN=" in x)
        return RunDir(line.partition("=")[2])

    def run(self, name: str = "last") -> RunDir:
        return RunDir(self.status(name)["path"])

    def attempts(self, name: str = "last") -> list[Attempt]:
        """The run's history, oldest first."""
        return ledger.attempts(self.run(name))

    def training(self, name: str = "last", attempt: int = 1, step: int = 1) -> dict[str, Any]:
        """Wait until an attempt took steps of its own and came to `step`.

        A later one begins with the step that was saved, and may have ended before the look.
        """

        def there(s: dict[str, Any]) -> bool:
            if s["attempt"] < attempt or s["step"] < step:
                return False
            lines = read_lines(RunDir(s["path"]).attempt(attempt).metrics)
            trains = s["state"] == "RUNNING" and any(x["event"] == "train" for x in lines)
            return trains or (attempt > 1 and s["state"] == "COMPLETED")

        return self.until(there, name)

    def take_all_nodes(self, seconds: float = 0.5) -> str:
        """A job of higher priority that needs every node: a real preemption. Its id."""
        count = str(len(self.nodes))
        argv = ("--partition=high", "--exclusive", f"--nodes={count}", f"--wrap=sleep {seconds}")
        done = self.slurm.run(
            "sbatch", "--parsable", *argv, "--output=/dev/null", cwd=self.folder, check=True
        )
        return done.stdout.strip()

    def sbatch(self, script: Path) -> str:
        """Plain sbatch; the job id."""
        done = self.slurm.run("sbatch", "--parsable", str(script), cwd=self.folder, check=True)
        return done.stdout.strip()


def wait_for(found: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < deadline, f"not so after {seconds:g} s"
        time.sleep(0.05)


def no_job_is_left(desk: Desk) -> None:
    """Wait until Slurm's queue is empty."""
    wait_for(lambda: not desk.slurm.run("squeue", "--noheader", check=True).stdout)


def pids(run: RunDir, attempt: int = 1) -> list[int]:
    """The processes of an attempt's ranks, by rank."""
    ranks = next(read_lines(run.attempt(attempt).metrics))["ranks"]
    return [rank["pid"] for rank in ranks]


@contextlib.contextmanager
def standing_still(ranks: Sequence[int]) -> Iterator[None]:
    """So that nothing changes while one looks, and acts on it."""
    try:
        for pid in ranks:
            os.kill(pid, signal.SIGSTOP)
        wait_for(lambda: all(_state(pid) == "T" for pid in ranks))
        yield
    finally:
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _state(pid: int) -> str:
    """As in proc(5), /proc/pid/stat."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


def make_toy(folder: Path) -> None:
    (folder / "jobs").mkdir(parents=True)
    (folder / "jobs/toy.toml").write_text("global_batch = 8\nmax_steps = 12\n")
    (folder / "jobs/toy.py").write_text(TOY)


LONG = ("--set", "max_steps=100000", "--set", "dataset.pause=0.01")
