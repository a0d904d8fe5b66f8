"""Rehearsal: a job on a sandbox of its own, once undisturbed and once with faults, compared."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from hpcddp.errors import SandboxError, UserError
from hpcddp.planning import jobfile, plan
from hpcddp.planning.jobfile import Layer
from hpcddp.planning.plan import Plan
from hpcddp.rundir import RunDir, read_step
from hpcddp.sandbox import compare, daemons, fault_times, faults
from hpcddp.sandbox.cluster import Sandbox
from hpcddp.sandbox.fault_times import EARLY, KINDS, Fault, Timeline
from hpcddp.sandbox.outcome import Report, rows
from hpcddp.sandbox.own_processes import Process
from hpcddp.sandbox.rehearsal_sandbox import Say, sandbox_of, sandboxed, surroundings
from hpcddp.sandbox.rehearsed_run import TICK, Over, RehearsedRun
from hpcddp.sizes import parse_gpus, parse_nodes
from hpcddp.submit import prepare, submission

SPARE = 1  # nodes beside the job's: one that was killed is not waited for
PATIENCE = 600.0  # seconds that a run may need for its next life, beside the time to find a hang


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
    check(counts, watch)
    nodes, gpus = _size(layers)
    daemons.require(accounting=False)
    begun = time.monotonic()
    with _kept(runs, say) as root, ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hp-", dir="/tmp")))
        sandbox = stack.enter_context(sandbox_of(home, nodes + SPARE, gpus))
        stack.enter_context(surroundings(sandbox))
        own = sandboxed(layers, counts, home, say)
        made = plan.make(own, [], environ=os.environ, folder=folder)
        say(f"a Slurm of {nodes + SPARE} nodes is up; seed {seed}")
        report = _Rehearsal(sandbox, made, root, say, watch).play(counts, seed)
        report.seconds = time.monotonic() - begun
        if report.passed and runs is None:
            shutil.rmtree(root)
    return report


def _size(layers: list[Layer]) -> tuple[int, int]:
    """Nodes, and ranks on each."""
    asked, sources = jobfile.merge(layers)
    nodes = parse_nodes(asked.nodes, where=sources.get("nodes", ""))
    if nodes.min != nodes.max:
        hint = "a rehearsal compares two runs of the same size"
        raise UserError(f"{asked.nodes} is a range", where=sources["nodes"], hint=hint)
    return nodes.max, parse_gpus(asked.gpus, where=sources.get("gpus", ""))


@contextmanager
def _kept(runs: Path | None, say: Say) -> Iterator[Path]:
    """The folder of the two runs: the given one, or one that is left where there is something to
    look into."""
    root = runs.absolute() if runs else Path(tempfile.mkdtemp(prefix="hpcddp-rehearsal-"))
    try:
        yield root
    except KeyboardInterrupt:
        if runs is None:
            shutil.rmtree(root)
        raise
    finally:
        if root.is_dir() and any(root.iterdir()):
            say(f"the runs are in {root}")
        elif runs is None:
            shutil.rmtree(root, ignore_errors=True)


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


class _Rehearsal:
    """The two runs of a rehearsal on its sandbox."""

    def __init__(self, sandbox: Sandbox, made: Plan, root: Path, say: Say, watch: float) -> None:
        self.sandbox, self.plan, self.root, self.say, self.watch = sandbox, made, root, say, watch
        self.patience = PATIENCE + 7 * made.spec.train.hang_seconds

    def play(self, counts: Mapping[str, int], seed: int) -> Report:
        """Both runs, one after the other, and the comparison."""
        reference = self._rehearsed()
        line = self._undisturbed(reference)
        clock = line.clock
        if clock and counts.get("hang"):
            raise UserError(
                "the program tells no steps, so nobody sees that it hangs",
                where="--hang",
                hint="hpcddp.attach in its loop tells them",
            )
        drawn = fault_times.draw(counts, seed, line)
        rehearsed = self._rehearsed(clock=clock)
        state, reason = self._disturbed(rehearsed, drawn, line)
        report = Report(
            self.plan.spec.name, seed, self.plan.nodes.max, self.plan.gpus,
            0 if clock else line.steps, state=state, reason=reason,
        )  # fmt: skip
        report.faults = rows(rehearsed, drawn)
        if clock:
            report.weights_equal = report.order_equal = None
        else:
            self._compare(reference.run, rehearsed.run, report)
        return report

    def _compare(self, reference: RunDir, run: RunDir, report: Report) -> None:
        """Fill in what both runs together tell."""
        report.steps_lost = compare.repeated(run)
        cost = sum(row.steps_lost for row in report.faults if KINDS[row.fault] and row.survived)
        report.steps_needless = max(0, report.steps_lost - cost)
        report.difference = compare.difference(reference, run, self.plan.topology.world_size)
        report.order_equal = not report.difference
        weights = compare.digest(reference)
        report.weights_equal = weights != "" and weights == compare.digest(run)

    def _rehearsed(self, *, clock: bool = False) -> RehearsedRun:
        run = prepare.new_run(self.plan, self.root)
        return RehearsedRun(self.sandbox, run, self.patience, clock=clock)

    def _undisturbed(self, rehearsed: RehearsedRun) -> Timeline:
        """The run without faults; it must come to its end in one life."""
        submission.submit(self.plan, rehearsed.run)
        seconds = self._life_of(rehearsed)
        found = _end(rehearsed)
        if found != ("COMPLETED", "") or rehearsed.number != 1:
            raise SandboxError(
                f"without any fault the job is {found[0]} after {rehearsed.number} attempts",
                where=rehearsed.run.name,
                hint=found[1],
            )
        last, when = read_step(rehearsed.run.attempt(1))
        if not last:
            self.say(f"the program tells no steps: it ran {seconds:.1f} s, and is to come back")
            return Timeline(0.0, TICK, int(seconds / TICK), clock=True)
        first, since = rehearsed.first_steps.get(1, (last, when))
        per_step = max(when - since, 1e-3) / max(1, last - first)
        line = Timeline(max(0.0, since - rehearsed.facts().began), per_step, last)
        self.say(
            f"undisturbed: {last} steps in {when - since:.1f} s, "
            f"after a start-up of {line.startup:.1f} s"
        )
        return line

    def _life_of(self, rehearsed: RehearsedRun) -> float:
        """For how many seconds the ranks of a program are there; 0 of one that was over before."""
        tasks: list[Process] = []
        began = ended = 0.0

        def left() -> bool:
            """Whether those that were seen have left, and no others are there."""
            nonlocal tasks
            tasks = [task for task in tasks if task.alive()] or rehearsed.tasks()
            return not tasks

        with suppress(Over):
            if self.plan.spec.command:
                tasks = rehearsed.until(rehearsed.tasks, "its ranks start")
                began = ended = time.time()
                try:
                    rehearsed.until(left, "its ranks leave", 10 * rehearsed.patience)
                finally:
                    ended = time.time()
        return ended - began

    def _disturbed(
        self, rehearsed: RehearsedRun, drawn: list[Fault], line: Timeline
    ) -> tuple[str, str]:
        """The run with the faults; its last state, and the reason."""
        coming = [*drawn, None]
        self._prepare(rehearsed, coming[0], 0, line)
        submission.submit(self.plan, rehearsed.run)
        try:
            for fault, later in zip(drawn, coming[1:], strict=True):
                self._come(rehearsed, fault)
                self._prepare(rehearsed, later, 0 if rehearsed.clock else fault.at, line)
                faults.PLAY[fault.kind](rehearsed, fault, self.watch)
                rehearsed.until_after(fault.attempt)
        except Over as end:
            self.say(f"the run is {end.status.state}: {end.status.reason or 'it is complete'}")
            return end.status.state, end.status.reason
        except SandboxError as error:
            self.say(str(error))
            for fault in [f for f in drawn if f.attempt][-1:]:
                fault.failed = fault.failed or error.what
            return "LOST", error.what
        return _end(rehearsed)

    def _prepare(
        self, rehearsed: RehearsedRun, fault: Fault | None, before: int, line: Timeline
    ) -> None:
        """A time limit has to be there when the life begins that it ends."""
        if fault and fault.kind == "timeout":
            rehearsed.limit_next(fault_times.limit(before, fault, line))

    def _come(self, rehearsed: RehearsedRun, fault: Fault) -> None:
        """Wait for the instant of a fault."""
        rehearsed.until(lambda: _due(rehearsed, fault), f"step {fault.step}")
        fault.attempt, fault.at = rehearsed.look()
        fault.when = time.time()
        at = f"after {fault.at * TICK:.1f} s" if rehearsed.clock else f"at step {fault.at}"
        place = at if fault.at else "while it starts"
        self.say(f"{fault.kind} {place}, attempt {fault.attempt}")


def _due(rehearsed: RehearsedRun, fault: Fault) -> bool:
    """Whether a fault's instant has come, in a life that still works."""
    number, step = rehearsed.look()
    if not number:
        return False
    if fault.kind == "timeout" and (deadline := rehearsed.limited()):
        # A start-up that took far longer than the first one uses up the limit by itself.
        return step >= fault.step or rehearsed.gone(number) or time.time() > deadline - 2 * EARLY
    if rehearsed.gone(number):
        return False
    if fault.step:
        return step >= fault.step
    return step > 0 or time.time() >= rehearsed.facts().began + fault.after


def _end(rehearsed: RehearsedRun) -> tuple[str, str]:
    """Wait for the end of the run: its state, and the reason."""
    try:
        rehearsed.until(lambda: False, "the job ends", 10 * rehearsed.patience)
    except Over as end:
        return end.status.state, end.status.reason
    raise AssertionError("a run that never ends is an error of its own")
