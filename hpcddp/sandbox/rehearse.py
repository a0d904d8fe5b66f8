"""Rehearsal: a job on a sandbox of its own, once undisturbed and once with faults, compared."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpcddp import history, jobfile, plan, prepare, shipped, submission
from hpcddp.errors import SandboxError, UserError
from hpcddp.jobfile import Layer
from hpcddp.plan import Plan
from hpcddp.rundir import read_step
from hpcddp.sandbox import compare, daemons, faults, instants
from hpcddp.sandbox import stage as stages
from hpcddp.sandbox.cluster import Sandbox
from hpcddp.sandbox.instants import KINDS, Fault, Timeline
from hpcddp.sandbox.stage import Over, Stage
from hpcddp.topology import parse_gpus, parse_nodes

Say = Callable[[str], None]

HERE = "the rehearsal"
HANG_SECONDS = 5.0  # the least silence that counts as a hang, where the job does not say
KEPT = ("slurm.signal", "slurm.requeue", "slurm.no-requeue")  # the other options are a site's
SPARE = 1  # nodes beside the job's: one that was killed is not waited for
PATIENCE = 600.0  # seconds that a run may need for its next life, beside the time to find a hang


@dataclass
class Row:
    """What came of one fault."""

    fault: str
    step: int  # at which it came; 0 in a start-up
    attempt: int  # that it hit; 0 if it could not be played
    cause: str  # that the run itself found
    survived: bool
    steps_lost: int
    seconds_lost: float | None  # from the last step before it to the first one after it
    reason: str = ""  # why it was not survived


@dataclass
class Report:
    """What came of a rehearsal."""

    job: str
    seed: int
    nodes: int
    gpus: int
    steps: int  # of the undisturbed run
    faults: list[Row] = field(default_factory=list)
    state: str = ""  # of the run with the faults
    reason: str = ""
    steps_lost: int = 0
    steps_needless: int = 0  # of these, lost for no good reason
    weights_equal: bool = False
    order_equal: bool = False
    difference: str = ""  # the first, where the order is not equal
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether all was survived, nothing was lost in vain, and the result is the same."""
        alive = all(row.survived for row in self.faults) and self.state == "COMPLETED"
        return alive and not self.steps_needless and self.weights_equal and self.order_equal

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with the version of its form."""
        return {"schema_version": 1, **asdict(self), "passed": self.passed}


def rehearse(
    layers: list[Layer],
    counts: Mapping[str, int],
    seed: int,
    *,
    say: Say,
    folder: Path,
    runs: Path | None = None,
    watch: float = 10.0,
) -> Report:
    """Boot a sandbox, run the job without and with faults on it, and compare.

    Whatever it starts ends with it.

    Args:
        layers: the job's values, the highest precedence first.
        counts: how many of each kind of fault.
        say: gets a line for each thing that happens.
        folder: the current one, where the job works.
        runs: where the two runs stay; without, they stay only if something went wrong.
        watch: seconds for which a cancelled run must stay so.

    Raises:
        UserError: nonsense was asked for, or the job is too short.
        SandboxError: no sandbox can start here, or the job fails without any fault.
    """
    begun = time.monotonic()
    check(counts, watch)
    asked, sources = jobfile.merge(layers)
    nodes = parse_nodes(asked.nodes, where=sources.get("nodes", ""))
    if nodes.min != nodes.max:
        hint = "a rehearsal compares two runs of the same size"
        raise UserError(f"{asked.nodes} is a range", where=sources["nodes"], hint=hint)
    daemons.require(accounting=False)
    with ExitStack() as stack:
        home = stack.enter_context(_home(say))
        sandbox = stack.enter_context(_sandbox(home, nodes.max + SPARE, parse_gpus(asked.gpus)))
        stack.enter_context(stages.surroundings(sandbox))
        made = plan.make(sandboxed(layers, counts, say), [], environ=os.environ, folder=folder)
        say(f"a Slurm of {nodes.max + SPARE} nodes is up; seed {seed}")
        root = (runs or home / "runs").absolute()
        report = _Rehearsal(sandbox, made, root, say, watch).play(counts, seed)
        report.seconds = time.monotonic() - begun
        if not report.passed and runs is None:
            kept = Path(tempfile.mkdtemp(prefix="hpcddp-rehearsal-"))
            shutil.move(root, kept / "runs")
            say(f"both runs are kept in {kept / 'runs'}")
    return report


def check(counts: Mapping[str, int], watch: float) -> None:
    """Refuse what is no rehearsal."""
    for kind, count in counts.items():
        if kind not in KINDS:
            raise UserError(f"there is no fault {kind!r}", hint=f"there are: {', '.join(KINDS)}")
        if count < 0:
            raise UserError(f"{count} is below 0", where=f"--{kind}")
    if not any(counts.values()):
        raise UserError("no fault is asked for", hint="such as --preempt 3 --kill-node 1")
    if watch < 0:
        raise UserError(f"{watch:g} is below 0", where="--watch")


def sandboxed(layers: list[Layer], counts: Mapping[str, int], say: Say) -> list[Layer]:
    """The job's layers as the sandbox can take them, below the rehearsal's own."""
    own, kept, left = Layer(), [], set()
    own.put("cluster", str(shipped.folder("templates") / "clusters" / "slurm.toml"), HERE)
    own.put("slurm.partition", "low", HERE)
    own.put("slurm.time", stages.TIME, HERE)
    own.put("train.trace", True, HERE)
    if counts.get("hang") and not any("train.hang_seconds" in layer.values for layer in layers):
        own.put("train.hang_seconds", HANG_SECONDS, HERE)
    for layer in layers:
        site = {n for n in layer.values if n.startswith("slurm.") and n not in KEPT}
        left |= site | ({"cluster"} & layer.values.keys())
        values = {n: v for n, v in layer.values.items() if n not in site}
        kept.append(Layer(values, layer.sources))
    if left:
        say(f"left out, for a cluster's own: {', '.join(sorted(left))}")
    return [own, *kept]


@contextmanager
def _home(say: Say) -> Iterator[Path]:
    """A folder that is removed in the end. Not below TMPDIR: the daemons' sockets want a short
    path."""
    with tempfile.TemporaryDirectory(prefix="hpcddp-", dir="/tmp", ignore_cleanup_errors=True) as f:
        yield Path(f)


@contextmanager
def _sandbox(home: Path, nodes: int, gpus: int) -> Iterator[Sandbox]:
    """A sandbox that ends with what is done within, also when this process is told to end."""
    main = threading.current_thread() is threading.main_thread()
    before = {s: signal.signal(s, _interrupt) for s in (signal.SIGTERM, signal.SIGHUP) if main}
    try:
        yield stages.boot(home, nodes, gpus)
    finally:
        if main:  # a second Ctrl-C must not leave half of it behind
            before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
        Sandbox(home / "slurm").down()
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


class _Rehearsal:
    """The two runs of a rehearsal on its sandbox."""

    def __init__(self, sandbox: Sandbox, made: Plan, root: Path, say: Say, watch: float) -> None:
        self.sandbox, self.plan, self.root, self.say, self.watch = sandbox, made, root, say, watch
        self.patience = PATIENCE + 7 * made.spec.train.hang_seconds
        self.played: list[Fault] = []

    def play(self, counts: Mapping[str, int], seed: int) -> Report:
        """Both runs, one after the other, and the comparison."""
        reference = self._stage()
        line = self._undisturbed(reference)
        drawn = instants.draw(counts, seed, line)
        stage = self._stage()
        state, reason = self._disturbed(stage, drawn, line)
        report = Report(
            self.plan.spec.name, seed, self.plan.nodes.max, self.plan.gpus, line.steps,
            state=state, reason=reason,
        )  # fmt: skip
        report.faults = rows(stage, drawn)
        report.steps_lost = compare.repeated(stage.run)
        cost = sum(row.steps_lost for row in report.faults if KINDS[row.fault] and row.survived)
        report.steps_needless = max(0, report.steps_lost - cost)
        ranks = self.plan.topology.world_size
        report.difference = compare.difference(reference.run, stage.run, ranks)
        report.order_equal = not report.difference
        weights = compare.digest(reference.run)
        report.weights_equal = weights != "" and weights == compare.digest(stage.run)
        return report

    def _stage(self) -> Stage:
        return Stage(self.sandbox, prepare.new_run(self.plan, self.root), self.patience)

    def _undisturbed(self, stage: Stage) -> Timeline:
        """The run without faults; it must come to its end in one life."""
        submission.submit(self.plan, stage.run)
        found = _end(stage)
        if found != ("COMPLETED", "") or stage.number != 1:
            raise SandboxError(
                f"without any fault the job is {found[0]} after {stage.number} attempts",
                where=stage.run.name,
                hint=found[1],
            )
        last, when = read_step(stage.run.attempt(1))
        first, since = stage.first_steps.get(1, (last, when))
        per_step = max(when - since, 1e-3) / max(1, last - first)
        line = Timeline(max(0.0, since - stage.facts().began), per_step, last)
        self.say(
            f"undisturbed: {last} steps in {when - since:.1f} s, "
            f"after a start-up of {line.startup:.1f} s"
        )
        return line

    def _disturbed(self, stage: Stage, drawn: list[Fault], line: Timeline) -> tuple[str, str]:
        """The run with the faults; its last state, and the reason."""
        coming = [*drawn, None]
        self._prepare(stage, coming[0], 0, line)
        submission.submit(self.plan, stage.run)
        try:
            for fault, later in zip(drawn, coming[1:], strict=True):
                self._come(stage, fault)
                self._prepare(stage, later, fault.at, line)
                faults.PLAY[fault.kind](stage, fault, self.watch)
                stage.until_after(fault.attempt)
        except Over as end:
            self.say(f"the run is {end.status.state}: {end.status.reason or 'it is complete'}")
            return end.status.state, end.status.reason
        except SandboxError as error:
            self.say(str(error))
            for fault in drawn:
                fault.failed = fault.failed or (error.what if fault.attempt else "")
            return "LOST", error.what
        return _end(stage)

    def _prepare(self, stage: Stage, fault: Fault | None, before: int, line: Timeline) -> None:
        """A time limit has to be there when the life begins that it ends."""
        if fault and fault.kind == "timeout":
            stage.limit_next(instants.limit(before, fault, line))

    def _come(self, stage: Stage, fault: Fault) -> None:
        """Wait for the instant of a fault."""
        stage.until(lambda: _due(stage, fault), f"step {fault.step}")
        fault.attempt, fault.at = stage.look()
        fault.when = time.time()
        place = f"at step {fault.at}" if fault.at else "while it starts"
        self.say(f"{fault.kind} {place}, attempt {fault.attempt}")


def _due(stage: Stage, fault: Fault) -> bool:
    """Whether a fault's instant has come, in a life that still works."""
    number, step = stage.look()
    if not number or stage.gone(number):
        return False
    if fault.step:
        return step >= fault.step
    return step > 0 or time.time() >= stage.facts().began + fault.after


def _end(stage: Stage) -> tuple[str, str]:
    """Wait for the end of the run: its state, and the reason."""
    try:
        stage.until(lambda: False, "the job ends", 10 * stage.patience)
    except Over as end:
        return end.status.state, end.status.reason
    raise AssertionError("a run that never ends is an error of its own")


def rows(stage: Stage, drawn: list[Fault]) -> list[Row]:
    """What came of each fault."""
    lost = compare.lost(stage.run)
    known = {row.attempt: row for row in history.rows(stage.run)}
    return [_row(stage, fault, lost.get(fault.attempt, 0), known) for fault in drawn]


def _row(stage: Stage, fault: Fault, lost: int, known: Mapping[int, history.Row]) -> Row:
    if not fault.attempt:
        reason = "the run had ended before"
        return Row(fault.kind, fault.step, 0, "", False, 0, None, reason)
    hit = known[fault.attempt]
    later = [n for n in stage.first_steps if n > fault.attempt]
    done = any(row.cause == "done" for n, row in known.items() if n >= fault.attempt)
    may = max(0, hit.last - hit.saved) if KINDS[fault.kind] else 0
    reason = fault.failed
    if not later and not done:
        reason = reason or f"it did not train again: {hit.cause}; {hit.action} {hit.reason}".strip()
    elif lost > may:
        reason = reason or f"{lost - may} steps more than it must cost"
    return Row(
        fault.kind, fault.at, fault.attempt, hit.cause or "", not reason, lost,
        _seconds(stage, fault, later), reason,
    )  # fmt: skip


def _seconds(stage: Stage, fault: Fault, later: list[int]) -> float | None:
    """From the last step of the life that was hit to the first step after it."""
    if not later:
        return None
    last = read_step(stage.run.attempt(fault.attempt))[1] or fault.when
    return max(0.0, stage.first_steps[min(later)][1] - last)
