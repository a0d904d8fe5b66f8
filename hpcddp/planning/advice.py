"""Step 3: whether a job can stop in time and come back: what it took before, what a site gives.

``warnings`` is a pure function; ``advise`` brings its facts together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcddp import record
from hpcddp.attempt import ledger
from hpcddp.attempt.ledger import Attempt
from hpcddp.errors import RunError
from hpcddp.rundir import AttemptDir, RunDir, last_lines, read_lines
from hpcddp.slurm import time_limit
from hpcddp.slurm.rules import Site

if TYPE_CHECKING:
    from hpcddp.planning.plan import Plan

TAIL = 1 << 16  # bytes of the metrics file that are read
LATEST = 10  # records of a kind that count
RUNS = 20  # of a job that are looked at, the newest first
MARGIN = 5.0  # seconds between the end of the last save and the time limit
FEW = 3  # steps that a life should get to take before it saves and leaves
MOST_LEAD = 65535  # seconds; sbatch takes no more


class Measured(NamedTuple):
    """What an earlier run of a job took, in seconds: the slowest of its latest steps and saves."""

    step: float
    save: float
    start: float  # from the batch script's first act to the first step's record
    run: str = ""

    @property
    def stop(self) -> float:
        """From a signal to a complete checkpoint: the step that it falls into, and the save."""
        return self.step + self.save

    @property
    def lead(self) -> int:
        """Before a time limit, when to begin to stop: twice of each, as the ranks reckon it."""
        return min(math.ceil(2 * self.stop + MARGIN), MOST_LEAD)


class AdviceInputs(NamedTuple):
    """What a warning depends on."""

    site: Site = Site()
    measured: Measured | None = None
    limit: float = math.inf  # seconds that one life of the job may take
    returns: bool = True  # requeue.enabled
    every: int = 100  # checkpoint.every


def warnings(facts: AdviceInputs) -> list[str]:
    """What a user should know before he submits: each says what is wrong, then what helps."""
    found = [_left(facts), _torn(facts), _idle(facts)]
    return [text for text in found if text]


def room(site: Site, took: Measured | None = None) -> str:
    """How long a step and a save together may take when a preemption ends a job; "" where none
    does."""
    if not site.preempts:
        return ""
    parts = f"{site.grace} s of grace and {site.kill_wait} s of KillWait"
    seen = f"; measured in {took.run}: {_s(took.stop)}" if took else ""
    return f"a preemption leaves {site.notice} s for a step and a save ({parts}){seen}"


def _left(facts: AdviceInputs) -> str:
    """A job that would not come back."""
    if facts.returns or not facts.site.preempts:
        return ""
    return (
        "this partition can be preempted, and requeue.enabled is false: a preempted job stays "
        "ended\n  --set requeue.enabled=true lets it come back by itself"
    )


def _torn(facts: AdviceInputs) -> str:
    """A preemption that leaves too little time to save."""
    took, notice = facts.measured, facts.site.notice
    if took is None or not facts.site.preempts or took.stop <= notice:
        return ""
    often = f"a checkpoint.every below {facts.every}" if facts.every else "a checkpoint.every"
    return (
        f"saves take {_s(took.save)}, steps {_s(took.step)}, this partition gives {notice} s "
        f"when it preempts a job (measured in {took.run}): the steps since the last checkpoint "
        f"will be lost\n  {often} loses fewer; "
        "fewer bytes or a faster file system for the runs make saves shorter"
    )


def _idle(facts: AdviceInputs) -> str:
    """A time limit that ends each life before it got anywhere."""
    took = facts.measured
    if took is None or facts.limit >= (least := took.start + FEW * took.step + took.lead):
        return ""
    return (
        f"the time limit is {_s(facts.limit)}, but the start takes {_s(took.start)}, and to stop "
        f"in time takes {_s(took.lead)} (measured in {took.run}): the job will not get on\n"
        f"  ask for more than {math.ceil(least / 60)} minutes with --time"
    )


def _s(seconds: float) -> str:
    """Seconds for a person."""
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def advise(plan: Plan, runs: Iterable[RunDir]) -> list[str]:
    """Put what the first of these runs with figures took into the plan; warnings for its user."""
    if plan.backend != "slurm":
        return []
    plan.measured = earlier(runs)
    site = plan.site or Site()
    limit = str(plan.spec.slurm.get("time", "")) or site.limit
    return warnings(
        AdviceInputs(
            site,
            plan.measured,
            time_limit.seconds(limit, "time") if limit else math.inf,
            plan.spec.requeue.enabled,
            plan.spec.checkpoint.every,
        )
    )


def alike(name: str, backend: str, runs: Iterable[RunDir]) -> Iterator[RunDir]:
    """Of these runs the first of a job's, on the same backend."""
    named = (run for run in runs if run.name.startswith(f"{name}-"))
    for run in itertools.islice(named, RUNS):
        try:
            job = record.read(run)
        except RunError:
            continue
        if (job.spec.get("name"), job.backend) == (name, backend):
            yield run


def earlier(runs: Iterable[RunDir]) -> Measured | None:
    """What the first of these runs with figures took."""
    return next((found for run in runs if (found := measured(run))), None)


def measured(run: RunDir) -> Measured | None:
    """What the newest attempt with figures took; None if there is none."""
    try:
        attempts = ledger.attempts(run)
    except RunError:
        return None
    rows = ((facts, run.attempt(facts.number)) for facts in reversed(attempts))
    return next((found for facts, folder in rows if (found := _measured(facts, folder))), None)


def _measured(facts: Attempt, folder: AttemptDir) -> Measured | None:
    first = next((r for r in read_lines(folder.metrics) if r.get("event") == "train"), None)
    tail = last_lines(folder.metrics, TAIL)
    # The first step is slower than all that follow: it counts only where it is the only one.
    trained = [r for r in tail if r.get("event") == "train" and r != first]
    steps = _latest(trained or ([first] if first else []), "step_s")
    saves = _latest([r for r in tail if r.get("event") == "checkpoint"], "seconds")
    if first is None or not steps or not saves:
        return None
    start = max(0.0, first["time"] - facts.began)
    return Measured(max(steps), max(saves), start, folder.path.parent.parent.name)


def _latest(rows: Sequence[dict[str, Any]], name: str) -> list[float]:
    """A value of the latest records that have it."""
    return [float(r[name]) for r in rows if isinstance(r.get(name), int | float)][-LATEST:]
