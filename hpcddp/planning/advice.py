"""Step 3: warnings about a job that may not save in time, be requeued, or make progress.

They follow from the times of earlier runs (earlier_runs.py) and from Slurm's rules. ``warnings`` is
a pure function; ``advise`` gets its facts from a plan. Nothing is refused here.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from hpcddp.planning import gpu_request
from hpcddp.planning.earlier_runs import Measured
from hpcddp.planning.plan import Plan
from hpcddp.planning.site.site_facts import SLOW_IMPORT
from hpcddp.sizes import counted
from hpcddp.slurm import time_limit
from hpcddp.slurm.rules import Site

SLOW = 120.0  # seconds of a start that is worth a word
FEW = 3  # fewest steps of an attempt that is worth its start


class AdviceInputs(NamedTuple):
    """The facts that the warnings depend on."""

    site: Site = Site()
    measured: Measured | None = None
    limit: float = math.inf  # seconds of one attempt
    returns: bool = True  # requeue.enabled
    every: int = 100  # checkpoint.every
    imported: float = 0.0  # seconds of the import of torch in a check-up


def warnings(facts: AdviceInputs) -> list[str]:
    """Warnings before a submission, each with the problem and a remedy."""
    texts = (_left(facts), _torn(facts), _idle(facts), _crawling(facts))
    return [text for text in texts if text]


def room(site: Site, measured: Measured | None = None) -> str:
    """The time that a preemption leaves for a step and a save, in a sentence; "" without
    preemption."""
    if not site.preempts:
        return ""
    parts = f"GraceTime {site.grace} s + KillWait {site.kill_wait} s"
    after = f"; {measured.run} needed {_s(measured.stop)}" if measured and measured.trained else ""
    return f"a preemption leaves {site.notice} s for a step and a save ({parts}){after}"


def _left(facts: AdviceInputs) -> str:
    """A job that would not be requeued."""
    if facts.returns or not facts.site.preempts:
        return ""
    return (
        "this partition can preempt the job, and requeue.enabled is false: a preempted job stays "
        "ended\n  add --set requeue.enabled=true to requeue it"
    )


def _torn(facts: AdviceInputs) -> str:
    """A preemption that leaves too little time to save."""
    times, notice = facts.measured, facts.site.notice
    if times is None or not facts.site.preempts or times.stop <= notice:
        return ""
    often = f"checkpoint.every below {facts.every}" if facts.every else "checkpoint.every"
    return (
        f"a preemption leaves {notice} s, but a save takes {_s(times.save)} and a step "
        f"{_s(times.step)} (in {times.run}): the steps since the last checkpoint will be lost\n"
        f"  set {often} to lose fewer steps, or put the runs on a faster file system"
    )


def _idle(facts: AdviceInputs) -> str:
    """A time limit that ends each attempt before it makes progress."""
    times = facts.measured
    if times is None or not times.trained:
        return ""
    if facts.limit >= (least := times.start + FEW * times.step + times.lead):
        return ""
    return (
        f"the time limit is {_s(facts.limit)}, but the start takes {_s(times.start)} and the stop "
        f"{_s(times.lead)} (in {times.run}): the job will make no progress\n"
        f"  use --time with more than {counted(math.ceil(least / 60), 'minute')}"
    )


def _crawling(facts: AdviceInputs) -> str:
    """A start that takes minutes: each attempt pays for it."""
    times = facts.measured
    faster = "an environment in one file (a container), or on the nodes' disks, starts faster"
    if facts.imported > SLOW_IMPORT:
        took = f"the import of torch took {_s(facts.imported)} in `hpcddp doctor`"
        return f"{took}, and each attempt pays for it\n  {faster}"
    if times is None or times.start < SLOW:
        return ""
    return (
        f"the start takes {_s(times.start)} (in {times.run}), in each attempt\n"
        f"  `hpcddp doctor` measures the import of torch; {faster}"
    )


def _s(seconds: float) -> str:
    """Seconds for a person."""
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def gpu_hours(plan: Plan) -> float:
    """GPU hours that one attempt can use; infinity without a time limit, 0 without GPUs."""
    limit = str(plan.spec.slurm.get("time", "")) or (plan.site.limit if plan.site else "")
    asks = gpu_request.asks(plan.spec, plan.gpu_request)
    gpus = plan.allocated.max * plan.gpus if asks else 0
    return gpus * time_limit.seconds(limit or "0", "time") / 3600 if gpus else 0.0


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
            plan.imported,
        )
    )
