"""Before submission: whether a job fits what Slurm said of the cluster, and what would fit.

What Slurm did not say refuses nothing. What a user forces with --sbatch, and what recorded facts of
more than a day ago say, is a note.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace

from hpcddp.errors import ClusterError, TopologyError
from hpcddp.keys import nearest
from hpcddp.planning.jobfile import FORCED
from hpcddp.planning.site import account_limits, job_qos, node_limits
from hpcddp.planning.site.cluster_now import ClusterNow
from hpcddp.planning.site.site_facts import SiteFacts, stamp
from hpcddp.planning.site.wanted import Problem, Wanted
from hpcddp.sizes import counted
from hpcddp.slurm import time_limit
from hpcddp.slurm.hostlist import expand_hosts
from hpcddp.slurm.reservations import Reservation


def check(wanted: Wanted, now: ClusterNow, facts: SiteFacts | None) -> list[str]:
    """Notes for the user about a job that fits, or may fit.

    Args:
        facts: those that were recorded with the profile.

    Raises:
        ClusterError: the first problem for which Slurm would refuse the job, or let it wait for
            ever.
    """
    if "," in wanted.option("clusters"):
        return []  # Slurm chooses the cluster
    if facts and wanted.option("clusters") not in ("", facts.cluster):
        facts = None  # they are of another cluster
    notes = []
    for problem in (*_present(wanted, now, facts), *_recorded(wanted, now, facts)):
        source = wanted.source(problem.key)
        if problem.sure and source != FORCED:
            raise ClusterError(problem.what, where=source, hint=problem.hint)
        notes.append(f"{problem.what}: {problem.hint}" if problem.hint else problem.what)
    return notes


def _present(wanted: Wanted, now: ClusterNow, facts: SiteFacts | None) -> Iterator[Problem]:
    """Problems by what Slurm says now."""
    names, known = wanted.partitions, [row.name for row in now.partitions]
    for name in names:
        if known and name not in known:
            hint = nearest(name, known, what="partition")
            yield Problem(f"unknown partition {name!r}", "partition", hint)
    if now.site and now.site.routed and not names:
        return  # a plugin chooses the partition
    rows = now.wanted(wanted.job)
    if len(rows) == 1:  # Slurm takes any of several that fits
        yield from node_limits.partition(wanted, rows[0], job_qos.flags(wanted, facts))
    kinds = now.kinds_for(wanted.job, wanted.gpus, wanted.gpu_type)
    if rows and kinds:
        yield from node_limits.nodes(wanted, ",".join(row.name for row in rows), kinds)


def _recorded(wanted: Wanted, now: ClusterNow, facts: SiteFacts | None) -> Iterator[Problem]:
    """Problems by what was recorded with the profile."""
    if facts is None:
        return
    old = facts.old
    again = "; `hpcddp cluster detect` reads it again" if old else ""
    more = f" (read {stamp(facts.read)}{again})"
    rows = now.wanted(wanted.job)
    routed = bool(now.site and now.site.routed and not wanted.partitions)
    partition = rows[0] if len(rows) == 1 and not routed else None
    for problem in account_limits.check(wanted, partition, facts):
        yield replace(problem, what=problem.what + more, sure=problem.sure and not old)
    for problem in _maintenance(wanted, now, facts):
        yield replace(problem, what=problem.what + more)
    yield from _budgets(wanted, now, facts)


def _budgets(wanted: Wanted, now: ClusterNow, facts: SiteFacts) -> Iterator[Problem]:
    """What the job may use, beside what is left to its account. A site may let it start all the
    same."""
    seconds, account = _limit(wanted, now), job_qos.account(wanted, facts)
    for budget in (row for row in facts.budgets if row.account == account):
        for name, count in wanted.tres().items():
            if name not in budget.limit or name == "mem":
                continue
            most = count // wanted.nodes.min * wanted.nodes.max
            hours, left = most * seconds / 3600, budget.left(name)
            owner = f"you in account {account}" if budget.user else f"account {account}"
            what = f"{owner} had {left:.6g} {name} hours left at {stamp(facts.read)}"
            hint = f"an attempt of this job may use {hours:.6g}" if math.isfinite(hours) else ""
            yield Problem(what, "time", hint, sure=False)


def _limit(wanted: Wanted, now: ClusterNow) -> float:
    """The time limit in seconds: the job's, or that of its partition."""
    limit = wanted.option("time") or (now.site.limit if now.site else "")
    return time_limit.seconds(limit or "0", wanted.source("time"))


def _maintenance(wanted: Wanted, now: ClusterNow, facts: SiteFacts) -> Iterator[Problem]:
    """A time limit that runs into a maintenance window: the job would wait for its end."""
    seconds, begin = _limit(wanted, now), time.time()
    for window in facts.reservations:
        soon = window.start < begin + seconds and begin < window.end
        if not window.maintenance or not soon or _enough_left(wanted, now, window):
            continue
        where = f" of {window.hosts}" if window.hosts else ""
        text = f"maintenance{where} from {stamp(window.start)} to {stamp(window.end)}"
        left = int((window.start - begin) // 60)
        hint = "the job waits for its end"
        if left > 0:
            hint = (
                f"a job with a time limit of more than {counted(left, 'minute')} waits for its end"
            )
        yield Problem(text, "time", hint, sure=False)


def _enough_left(wanted: Wanted, now: ClusterNow, window: Reservation) -> bool:
    """Whether enough nodes for the job are outside of a maintenance window."""
    if not window.hosts:
        return False
    try:
        closed = set(expand_hosts(window.hosts))
        kinds = now.kinds_for(wanted.job, wanted.gpus, wanted.gpu_type)
        hosts = {host for kind in kinds for host in expand_hosts(kind.hosts)}
    except TopologyError:
        return True  # unknown
    return len(hosts - closed) >= wanted.nodes.min
