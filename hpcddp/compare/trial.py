"""`hpcddp strategies`: each strategy on this machine, compared with one process in float64.

A case is a row: a strategy with its ranks. It is planned as any other run, in float32 and in
float64. One process trains all cases with one rank; then the processes of all ranks train the other
cases in turn (trial_ranks.py). If a case fails, they end, and new processes train the next cases.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from subprocess import Popen
from types import FrameType, TracebackType
from typing import Any

from hpcddp import record, strategy
from hpcddp.attempt.rendezvous import free_port
from hpcddp.compare.strategy_cases import Case
from hpcddp.errors import UserError
from hpcddp.planning import plan
from hpcddp.planning.asked import Asked
from hpcddp.planning.jobfile import Layer
from hpcddp.planning.plan import Plan
from hpcddp.rundir import RunDir, last_lines, read_json, read_lines, write_json

# Times and sizes are those of the first; the second is compared with a run of one process.
PRECISIONS = ("fp32", "fp64")
# The keys of each trial, which needs neither evaluation nor checkpoints.
KEYS: dict[str, Any] = {
    "cluster": "local",
    "launcher": "spawn",
    "nodes": "1",
    "epochs": 0,
    "train.log_every": 1,
    "train.eval_every": 0,
    "train.measure": True,
    "checkpoint.every": 0,
    "checkpoint.best": "",
}
FIRST = 2  # first steps, not timed
TAIL = 4096  # bytes that include the last line of a log or of metrics


@dataclass
class Trial:
    """A case of a job, and its outcome."""

    case: Case
    ranks: int  # processes
    runs: dict[str, RunDir] = field(default_factory=dict)  # by precision
    environ: dict[str, str] = field(default_factory=dict)
    reason: str = ""  # why it is impossible, or how it failed
    failed: bool = False

    @property
    def done(self) -> bool:
        """Whether its last run has ended."""
        *_, run = self.runs.values()
        return any(r["event"] == "end" for r in last_lines(run.attempt(1).metrics, TAIL))

    def look(self) -> bool:
        """Read the error of its ranks; whether there is one."""
        for run in self.runs.values():
            if error := read_json(run.attempt(1).error):
                # An error of the user is a result, not a failure.
                self.failed = bool(error["traceback"]) or error["kind"] != "mistake"
                text = str(error["message"]).splitlines()[0]
                task = str((read_json(run.job) or {}).get("spec", {}).get("task"))
                kind = f"{error['type']}: " if error["traceback"] else ""
                self.reason = kind + text.removeprefix(f"{task}: ")
                return True
        return False


def prepare(layers: Sequence[Layer], case: Case, ranks: int, steps: int, root: Path) -> Trial:
    """Plan a case and make its run folders; an error of the plan becomes the trial's reason.

    Args:
        layers: the job's values, the highest precedence first.

    Raises:
        UserError: one process cannot train the job either.
    """
    trial = Trial(case, 1 if case.alone else ranks)
    for precision in PRECISIONS:
        try:
            planned = _plan(layers, case, ranks, steps, precision)
        except UserError as error:
            if case.single:  # the error is in the job itself
                raise
            trial.reason = trial.reason or ("" if trial.runs else error.what)
            continue
        run = RunDir(root / case.name.replace(" ", "-") / precision)
        run.create()
        record.write(run, planned.record(run))
        trial.runs[precision], trial.environ = run, planned.environment()
    return trial


def _plan(layers: Sequence[Layer], case: Case, ranks: int, steps: int, precision: str) -> Plan:
    gpus = 1 if case.single else ranks
    top, mesh = Layer(), strategy.layout(case.strategy, 1, gpus)
    own = {"strategy": case.strategy, "gpus": gpus, "max_steps": steps,
           "train.precision": precision}  # fmt: skip
    for key, value in {**KEYS, **own, **case.keys}.items():
        top.put(key, value, "hpcddp strategies")
    tables = [("pp.", mesh.pp > 1), ("ddp.", mesh.plain and mesh.world_size > 1)]
    unused = tuple(table for table, used in tables if not used)
    below = [_without(layer, unused) for layer in layers]
    asked = Asked.read([top, *below], [], os.environ)
    planned = plan.make(asked, environ=os.environ, folder=Path.cwd())
    if planned.spec.command:
        what = "the job has a command, which distributes its model itself"
        raise UserError(what, where="command", hint="use a job with a task")
    return planned


def _without(layer: Layer, tables: tuple[str, ...]) -> Layer:
    """A layer without the tables that a strategy does not use."""
    values = {k: v for k, v in layer.values.items() if not k.startswith(tables)}
    return Layer(values, layer.sources) if tables else layer


class TrialProcesses:
    """Processes that train some trials, as lines of their output. They end with the context."""

    def __init__(self, trials: Sequence[Trial], look: Sequence[Trial], root: Path) -> None:
        self._trials, self._root = trials, root
        number = len(list(root.glob("log-*"))) + 1
        self._log, self._file = root / f"log-{number}", root / f"trials-{number}.json"
        write_json(self._file, {
            "train": [str(run.path) for trial in trials for run in trial.runs.values()],
            "look": [str(run.path) for trial in look for run in trial.runs.values()],
        })  # fmt: skip

    def __enter__(self) -> Iterator[bytes]:
        first, python = self._trials[0], [sys.executable, "-P", "-m"]
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        kept = {n: v for n, v in os.environ.items() if n not in ("HPCDDP_RUN_DIR",)}
        program = [*python, "hpcddp.train.trial_ranks", str(self._file)]
        self._process: Popen[bytes] | None = None
        try:
            with _uninterrupted():
                self._process = Popen(
                    [*python, "hpcddp.launch.spawn", "1", str(first.ranks), *program],
                    env={**kept, **first.environ, **where}, stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                    process_group=0,  # Ctrl-C reaches only this process, which ends them
                )  # fmt: skip
            return self._lines()
        except BaseException:  # after which __exit__ is not called
            self._end(at_once=True)
            raise

    def _lines(self) -> Iterator[bytes]:
        assert self._process and self._process.stdout
        with self._log.open("wb") as log:
            for line in self._process.stdout:
                log.write(line)
                yield line

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:  # fmt: skip
        self._end(at_once=kind is not None)

    def _end(self, *, at_once: bool) -> None:
        if self._process is None:
            return
        if at_once:
            self._process.terminate()
        try:
            self._process.wait()
        except BaseException:
            self._process.terminate()
            self._process.wait()
            raise
        assert self._process.stdout
        self._process.stdout.close()

    def said(self) -> str:
        """Their exit code and their last line of output."""
        lines = self._log.read_bytes()[-TAIL:].decode(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        assert self._process
        return f"its ranks ended with exit code {self._process.returncode}: {last}"


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C: during Popen it would leave a process without its id being known.

    A handler delays it, since a started process would inherit a signal mask.
    """
    earlier = signal.getsignal(signal.SIGINT)
    if not callable(earlier) or threading.current_thread() is not threading.main_thread():
        yield  # Ctrl-C does not reach this thread
        return
    calls: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda *arguments: calls.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, earlier)
    if calls:
        earlier(*calls[0])


def play(trials: Sequence[Trial], root: Path, note: Callable[[str], object]) -> Iterator[Trial]:
    """Train all trials, and yield each when it has ended, in their order.

    Args:
        root: the folder of their runs.
        note: called with each note of their ranks.
    """
    alone = [trial for trial in trials if trial.ranks == 1]
    rest = [trial for trial in trials if trial.ranks > 1]
    yield from _play(alone, rest, root, note)
    for trial in rest:
        trial.reason or trial.look()
    yield from _play(rest, [], root, note)


def _play(
    trials: Sequence[Trial], look: Sequence[Trial], root: Path, note: Callable[[str], object]
) -> Iterator[Trial]:
    left = list(trials)
    while left:
        while left and left[0].reason:
            yield left.pop(0)
        todo = [trial for trial in left if not trial.reason]
        if not todo:
            continue
        ranks = TrialProcesses(todo, look, root)
        with ranks as lines:
            for line in lines:
                _, mark, text = line.decode(errors="replace").partition(": note: ")
                if mark:
                    note(text.rstrip())
                while left and (left[0].reason or left[0].done):
                    yield left.pop(0)
        if left and not left[0].look():
            left[0].reason, left[0].failed = ranks.said(), True
        look = []


@dataclass
class TrialResult:
    """The result of a trial; None for an unknown value.

    Args:
        loss: of the last step, by precision.
        memory: bytes of the rank with the most, by purpose.
        sent: bytes of all ranks in a step.
        step: median, in seconds.
    """

    loss: dict[str, float]
    memory: dict[str, int | None]
    sent: float | None
    step: float | None


def figures(trial: Trial) -> TrialResult:
    """Read a trial's result from its metrics."""
    trained = {
        precision: [r for r in read_lines(run.attempt(1).metrics) if r["event"] == "train"]
        for precision, run in trial.runs.items()
    }
    loss = {precision: records[-1]["loss"] for precision, records in trained.items() if records}
    timed = trained.get(PRECISIONS[0], [])[FIRST:]
    memory = timed[-1].get("memory", {}) if timed else {}
    sent = [r["sent"] for r in timed if r.get("sent") is not None]
    return TrialResult(
        loss, memory, median(sent) if sent else None,
        median(r["step_s"] for r in timed) if timed else None,
    )  # fmt: skip
