"""Rehearsal: a job on a sandbox of its own, without faults and with them, and the comparison."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from hpcddp.errors import SandboxError, UserError
from hpcddp.planning import jobfile, plan
from hpcddp.planning.asked import Asked
from hpcddp.planning.jobfile import Layer
from hpcddp.planning.plan import Plan
from hpcddp.rundir import RunDir, read_step
from hpcddp.sandbox import compare, daemons, fault_times, faults, time_limits
from hpcddp.sandbox.cluster import Sandbox
from hpcddp.sandbox.fault_times import EARLY, KINDS, Fault, Timeline
from hpcddp.sandbox.outcome import Report, outcomes
from hpcddp.sandbox.own_processes import OwnProcess
from hpcddp.sandbox.rehearsal_sandbox import Say, own_sandbox, sandboxed
from hpcddp.sandbox.rehearsed_run import TICK, Over, RehearsedRun
from hpcddp.sizes import counted, parse_gpus, parse_nodes
from hpcddp.submit import prepare, submission

SPARE = 1  # nodes besides the job's: it need not wait for a killed one
PATIENCE = 600.0  # seconds that a run may need for its next attempt, plus the time to find a hang


def rehearse(
    layers: list[Layer],
    counts: Mapping[str, int],
    seed: int,
    *,
    say: Say,
    folder: Path,
    runs: Path | None = None,
    watch: float = 10.0,
    two: int = 0,
    down: int = 0,
) -> Report:
    """Start a sandbox, run the job on it without and with faults, compare both runs, and end all.

    Args:
        layers: the job's values, the highest precedence first.
        counts: the number of each kind of fault.
        say: called with a line for each event.
        folder: the current one, where the job runs.
        runs: the folder that keeps the two runs. Without it they stay only after a failure.
        watch: seconds for which a cancelled run must stay cancelled.
        two: the number of faults during which a rank is killed as well.
        down: the number of lost nodes that return only when Slurm has marked them as down.

    Raises:
        UserError: an option is wrong, or the job is too short.
        SandboxError: the sandbox cannot start, or the job fails without faults.
    """
    check(counts, watch, two, down)
    nodes, more, gpus = _size(layers)
    daemons.require(accounting=False)
    begun = time.monotonic()
    with _kept(runs, say) as root, own_sandbox(nodes + more, gpus, more > SPARE) as sandbox:
        checked = _plan(sandboxed(layers, counts, sandbox.folder.parent, say), folder, root)
        say(f"the sandbox is up with {nodes} + {more} spare nodes; seed {seed}")
        report = _Rehearsal(sandbox, checked, root, say, watch).play(counts, seed, two, down)
        report.seconds = time.monotonic() - begun
        if report.passed and runs is None:
            shutil.rmtree(root)
    return report


def _plan(layers: list[Layer], folder: Path, root: Path) -> Plan:
    """The checked plan of the job, whose runs lie in ``root``."""
    asked = Asked.read(layers, [], os.environ)
    return plan.make(asked, environ=os.environ, folder=folder, runs=root)


def _size(layers: list[Layer]) -> tuple[int, int, int]:
    """Nodes that train, the others, and ranks on each node."""
    asked, sources = jobfile.merge(layers)
    nodes = parse_nodes(asked.nodes, where=sources.get("nodes", ""))
    if nodes.min != nodes.max:
        message = f"expected a number of nodes, got the range {asked.nodes}"
        hint = "a rehearsal compares two runs of the same size"
        raise UserError(message, where=sources["nodes"], hint=hint)
    return nodes.max, asked.spares + SPARE, parse_gpus(asked.gpus, where=sources.get("gpus", ""))


@contextmanager
def _kept(runs: Path | None, say: Say) -> Iterator[Path]:
    """The folder of the two runs: the given one, or a new one, which stays if a run is in it."""
    root = runs.absolute() if runs else Path(tempfile.mkdtemp(prefix="hpcddp-rehearsal-"))
    root.mkdir(parents=True, exist_ok=True)  # the sandbox's nodes share what is there at its start
    try:
        yield root
    except KeyboardInterrupt:
        if runs is None:
            shutil.rmtree(root)
        raise
    finally:
        if root.is_dir() and any(root.iterdir()):
            say(f"both runs are kept in {root}")
        elif runs is None:
            shutil.rmtree(root, ignore_errors=True)


def check(counts: Mapping[str, int], watch: float, two: int = 0, down: int = 0) -> None:
    """Check the options of a rehearsal.

    Raises:
        UserError: one is wrong.
    """
    for kind, count in counts.items():
        if kind not in KINDS:
            raise UserError(f"unknown fault {kind!r}", hint=f"use one of {', '.join(KINDS)}")
        if count < 0:
            raise UserError(f"must be at least 0, not {count}", where=f"--{kind}")
    if not any(counts.values()):
        hint = "ask for some, such as --preempt 3 --kill-node 1"
        raise UserError("a rehearsal needs at least one fault", hint=hint)
    lost = sum(counts.get(kind, 0) for kind in fault_times.LOST)
    losing = " and ".join(f"--{kind}" for kind in fault_times.LOST)
    limits = (
        ("two", two, sum(counts.values()), "the number of faults"),
        ("down", down, lost, f"the number of nodes that {losing} lose"),
    )
    for name, number, most, what in limits:
        if not 0 <= number <= most:
            text = f"must be from 0 to {most}, {what}, not {number}"
            raise UserError(text, where=f"--{name}")
    if watch < 0:
        raise UserError(f"must be at least 0, not {watch:g}", where="--watch")


class _Rehearsal:
    """The two runs of a rehearsal on its sandbox."""

    def __init__(self, sandbox: Sandbox, plan: Plan, root: Path, say: Say, watch: float) -> None:
        self.sandbox, self.plan, self.root, self.say, self.watch = sandbox, plan, root, say, watch
        self.patience = PATIENCE + 7 * plan.spec.train.hang_seconds

    def play(self, counts: Mapping[str, int], seed: int, two: int, down: int) -> Report:
        """Do both runs, one after the other, and compare them."""
        self.say("run 1 of 2: without faults")
        reference = self._new_run()
        timeline = self._undisturbed(reference)
        clock = timeline.clock
        if clock and counts.get("hang"):
            raise UserError(
                "the program reports no steps, so a hang cannot be seen",
                where="--hang",
                hint="report them with hpcddp.attach in its loop, or leave --hang out",
            )
        drawn = fault_times.draw(counts, seed, timeline, two=two, down=down)
        self.say(f"run 2 of 2: with {counted(len(drawn), 'fault')}")
        run = self._new_run(clock=clock)
        state, reason = self._disturbed(run, drawn, timeline)
        report = Report(
            self.plan.spec.name, seed, self.plan.nodes.max, self.plan.gpus,
            0 if clock else timeline.steps, state=state, reason=reason,
        )  # fmt: skip
        report.faults = outcomes(run, drawn)
        if clock:
            report.weights_equal = report.order_equal = None
        else:
            self._compare(reference.folder, run.folder, report)
        return report

    def _compare(self, reference: RunDir, run: RunDir, report: Report) -> None:
        """Fill in the comparison of both runs."""
        lost, report.steps_repeated = sum(compare.lost(run).values()), compare.repeated(run)
        report.steps_lost = lost if report.state == "COMPLETED" else None
        cost = sum(fault.steps_lost or 0 for fault in report.faults if fault.survived)
        report.steps_needless = max(0, lost - cost)
        report.difference = compare.difference(reference, run, self.plan.topology.world_size)
        report.order_equal = not report.difference
        weights = compare.digest(reference)
        report.weights_equal = weights != "" and weights == compare.digest(run)

    def _new_run(self, *, clock: bool = False) -> RehearsedRun:
        folder = prepare.new_run(self.plan, self.root, staged=True)
        return RehearsedRun(self.sandbox, folder, self.patience, self.say, clock=clock)

    def _undisturbed(self, run: RehearsedRun) -> Timeline:
        """Do the run without faults, which must end in one attempt."""
        submission.submit(self.plan, run.folder)
        seconds = self._seconds_of_ranks(run)
        state, reason = _end(run)
        if (state, reason) != ("COMPLETED", "") or run.number != 1:
            raise SandboxError(
                f"without any fault the job is {state} after {counted(run.number, 'attempt')}",
                where=str(run.folder.path),
                hint=reason or f"see {run.folder.path}/log",
            )
        last, when = read_step(run.folder.attempt(1))
        if not last:
            self.say(f"without faults: {seconds:.1f} s; the program reports no steps to compare")
            return Timeline(0.0, TICK, int(seconds / TICK), clock=True)
        first, since = run.first_steps.get(1, (last, when))
        per_step = max(when - since, 1e-3) / max(1, last - first)
        timeline = Timeline(max(0.0, since - run.facts().began), per_step, last)
        self.say(
            f"without faults: {counted(last, 'step')} in {when - since:.1f} s, "
            f"after a start of {timeline.startup:.1f} s"
        )
        return timeline

    def _seconds_of_ranks(self, run: RehearsedRun) -> float:
        """Seconds for which a program's ranks run; 0 if they ended before the first look."""
        tasks: list[OwnProcess] = []
        began = ended = 0.0

        def left() -> bool:
            """Whether all known ranks have ended, and no others run."""
            nonlocal tasks
            tasks = [task for task in tasks if task.alive()] or run.tasks()
            return not tasks

        with suppress(Over):
            if self.plan.spec.command:
                tasks = run.until(run.tasks, "the ranks to start")
                began = ended = time.time()
                try:
                    run.until(left, "the ranks to end", 10 * run.patience)
                finally:
                    ended = time.time()
        return ended - began

    def _disturbed(
        self, run: RehearsedRun, drawn: list[Fault], timeline: Timeline
    ) -> tuple[str, str]:
        """Do the run with the faults; returns its last state, and the reason."""
        coming = [*drawn, None]
        self._prepare(run, coming[0], 0, timeline)
        submission.submit(self.plan, run.folder)
        try:
            for fault, following in zip(drawn, coming[1:], strict=True):
                self._wait_for(run, fault)
                self._prepare(run, following, 0 if run.clock else fault.at, timeline)
                with faults.second(run, fault):
                    faults.PLAY[fault.kind](run, fault, self.watch)
                    run.until_after(fault.attempt, without=fault.node)
        except Over as end:
            reason = f": {end.status.reason}" if end.status.reason else ""
            self.say(f"the run has ended as {end.status.state}{reason}")
            return end.status.state, end.status.reason
        except SandboxError as error:
            self.say(str(error))
            for fault in [f for f in drawn if f.attempt][-1:]:
                fault.failed = fault.failed or error.what
            return "LOST", error.what
        return _end(run)

    def _prepare(
        self, run: RehearsedRun, fault: Fault | None, before: int, timeline: Timeline
    ) -> None:
        """Set the time limit of a fault before its attempt begins."""
        if fault and fault.kind == "timeout":
            seconds = fault_times.limit(before, fault, timeline)
            time_limits.limit_next(self.sandbox.folder.parent, seconds)

    def _wait_for(self, run: RehearsedRun, fault: Fault) -> None:
        """Wait for the time of a fault."""
        if fault.kind == "timeout" and run.number:
            time_limits.limit_now(self.sandbox.folder.parent, run.facts().job_id)
        run.until(lambda: _due(run, fault), f"step {fault.step}")
        fault.attempt, fault.at = run.look()
        fault.when = time.time()
        at = f"after {fault.at * TICK:.1f} s" if run.clock else f"at step {fault.at}"
        moment = at if fault.at else "during the start"
        more = "" if fault.second is None else f", and a killed rank {fault.second:.1f} s later"
        self.say(f"{fault.kind} {moment} of attempt {fault.attempt}{more}")


def _due(run: RehearsedRun, fault: Fault) -> bool:
    """Whether the time of a fault has come, in an attempt that still runs."""
    number, step = run.look()
    if not number:
        return False
    if fault.kind == "timeout" and (deadline := time_limits.deadline(run.facts())):
        # A start that takes much longer than the first one may use up the limit.
        return step >= fault.step or run.gone(number) or time.time() > deadline - 2 * EARLY
    if run.gone(number):
        return False
    if fault.step:
        return step >= fault.step
    return step > 0 or time.time() >= run.facts().began + fault.after


def _end(run: RehearsedRun) -> tuple[str, str]:
    """Wait for the end of the run: its state, and the reason."""
    try:
        run.until(lambda: False, "the job to end", 10 * run.patience)
    except Over as end:
        return end.status.state, end.status.reason
    raise AssertionError("until raises an error of its own")
