"""Step 3: warnings of a plan whose job may not stop in time, come back, or get on.

They follow from what the job took before (earlier_runs.py) and from Slurm's rules. ``warnings`` is
a pure function; ``advise`` takes its facts from a plan. Nothing is refused here.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from hpcddp.planning.earlier_runs import Measured
from hpcddp.planning.plan import Plan
from hpcddp.slurm import time_limit
from hpcddp.slurm.rules import Site

FEW = 3  # steps that an attempt should take at least before it saves and leaves


class AdviceInputs(NamedTuple):
    """The facts that the warnings depend on."""

    site: Site = Site()
    measured: Measured | None = None
    limit: float = math.inf  # seconds that one attempt may take
    returns: bool = True  # requeue.enabled
    every: int = 100  # checkpoint.every


def warnings(facts: AdviceInputs) -> list[str]:
    """What a user should know before he submits: each says what is wrong, then what helps."""
    return [text for text in (_left(facts), _torn(facts), _idle(facts)) if text]


def room(site: Site, measured: Measured | None = None) -> str:
    """How long a step and a save together may take when a preemption ends a job; "" where no
    preemption does."""
    if not site.preempts:
        return ""
    parts = f"{site.grace} s of grace and {site.kill_wait} s of KillWait"
    after = f"; measured in {measured.run}: {_s(measured.stop)}" if measured else ""
    return f"a preemption leaves {site.notice} s for a step and a save ({parts}){after}"


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
    times, notice = facts.measured, facts.site.notice
    if times is None or not facts.site.preempts or times.stop <= notice:
        return ""
    often = f"a checkpoint.every below {facts.every}" if facts.every else "a checkpoint.every"
    return (
        f"saves take {_s(times.save)}, steps {_s(times.step)}, this partition gives {notice} s "
        f"when it preempts a job (measured in {times.run}): the steps since the last checkpoint "
        f"will be lost\n  {often} loses fewer; "
        "fewer bytes or a faster file system for the runs make saves shorter"
    )


def _idle(facts: AdviceInputs) -> str:
    """A time limit that ends each attempt before it has got anywhere."""
    times = facts.measured
    if times is None or facts.limit >= (least := times.start + FEW * times.step + times.lead):
        return ""
    return (
        f"the time limit is {_s(facts.limit)}, but the start takes {_s(times.start)}, and to stop "
        f"in time takes {_s(times.lead)} (measured in {times.run}): the job will not get on\n"
        f"  ask for more than {math.ceil(least / 60)} minutes with --time"
    )


def _s(seconds: float) -> str:
    """Seconds for a person."""
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def advise(plan: Plan) -> list[str]:
    """Warnings for the user of a plan."""
    if plan.backend != "slurm":
        return []
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
