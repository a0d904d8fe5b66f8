"""Before submission: the account and QOS of a job, and their limits.

Slurm applies the first limit that is set, in this order: the QOS of the partition, that of the job
(before it, if that one has the flag OverPartQOS), the association of the user
(https://slurm.schedmd.com/resource_limits.html).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from hpcddp.keys import nearest
from hpcddp.planning.site import job_qos, partition_choice
from hpcddp.planning.site.site_facts import SiteFacts
from hpcddp.planning.site.wanted import Problem, Wanted
from hpcddp.sizes import counted
from hpcddp.slurm import time_limit
from hpcddp.slurm.accounts import Association, Qos
from hpcddp.slurm.partitions import Partition

UNITS = {"node": "node", "gres/gpu": "GPU", "cpu": "CPU"}
KEYS = {"node": "nodes", "cpu": "cpus-per-task"}  # others: gpus
# Fields with limits, and of what.
PER_NODE = "node_tres"
LIMITS = {"max_tres": "a job", "user_tres": "all jobs of a user", "group_tres": "all its jobs",
          PER_NODE: "each node"}  # fmt: skip
AGAIN = "`hpcddp cluster detect` reads them again"
FOR_EVER = "the job would never start: "


class Owner(NamedTuple):
    """What has limits; `row` is None if they are unknown."""

    name: str
    row: Association | Qos | None


def check(wanted: Wanted, partition: Partition | None, facts: SiteFacts) -> Iterator[Problem]:
    """Problems with the account, the QOS and their limits.

    Args:
        partition: of the job; None if it may run in several, or in one that is unknown.
    """
    yield from _account(wanted, facts)
    if partition:
        yield from _defaults(wanted, partition, facts)
    owners = list(_owners(wanted, partition, facts))
    enforced = job_qos.enforced(facts, "limits")
    if enforced is False:
        return
    for problem in (*_least(wanted, owners), *_most(wanted, owners), *_minutes(wanted, owners),
                    *_wall(wanted, owners)):  # fmt: skip
        sure = problem.sure and bool(enforced)
        yield Problem(problem.what, problem.key, problem.hint, sure=sure)


def _account(wanted: Wanted, facts: SiteFacts) -> Iterator[Problem]:
    """An account that is none of the user's, a QOS that the account may not use."""
    account, own = wanted.option("account"), {row.account for row in facts.associations}
    if account and own and account.lower() not in own:
        hint = f"{nearest(account, own, what='account')}; {AGAIN}"
        sure = bool(job_qos.enforced(facts, "associations"))
        yield Problem(f"you have no account {account!r}", "account", hint, sure=sure)
    used = job_qos.account(wanted, facts)
    may = {name for row in facts.associations if row.account == used for name in row.qos}
    qos, known = wanted.option("qos").lower(), {row.name for row in facts.qos}
    if qos and known and qos not in known:  # a plugin may know other names
        hint = f"{nearest(qos, may or known, what='QOS')}; {AGAIN}"
        yield Problem(f"Slurm has no QOS {qos!r}", "qos", hint, sure=False)
    elif qos and may and qos not in may:
        what = f"QOS {qos!r} may not be used with account {used}"
        hint = nearest(qos, may, what="QOS")
        sure = qos in known and bool(job_qos.enforced(facts, "qos"))
        yield Problem(what, "qos", hint, sure=sure)


def _defaults(wanted: Wanted, partition: Partition, facts: SiteFacts) -> Iterator[Problem]:
    """A partition that the user's default account or default QOS may not use. A plugin may choose
    others, so nothing of it is sure."""
    account = "" if wanted.option("account") else facts.default_account
    may = partition_choice.accounts_for(facts, partition)
    if account and account not in may:
        what = f"partition {partition.name} may refuse your default account, {account}"
        hint = f"use --account {may[0]}" if may else "use another partition"
        yield Problem(what, "account", hint, sure=False)
    qos = "" if wanted.option("qos") else job_qos.name_of(wanted, facts)
    if qos and (qos in partition.denied_qos or (partition.qos and qos not in partition.qos)):
        what = f"your default QOS, {qos}, may not be used in partition {partition.name}"
        fit = [name for name in partition.qos if name not in partition.denied_qos]
        hint = f"use --qos with one of {', '.join(fit[:8])}" if fit else "use --qos with another"
        yield Problem(what, "qos", hint, sure=False)


def _owners(wanted: Wanted, partition: Partition | None, facts: SiteFacts) -> Iterator[Owner]:
    """Those whose limits count, in Slurm's order."""
    name = job_qos.name_of(wanted, facts)
    job = Owner(f"QOS {name}" if name else "the job's QOS", job_qos.row_of(name, facts))
    of_partition = Owner("the QOS of its partition", None)
    if partition:
        own = partition.own_qos
        of_partition = Owner(f"QOS {own} of partition {partition.name}", job_qos.row_of(own, facts))
    first = isinstance(job.row, Qos) and "OverPartQOS" in job.row.flags
    yield from (job, of_partition) if first else (of_partition, job)
    if facts.associations:
        rows = job_qos.associations(wanted, facts)
        row = rows[0] if len(rows) == 1 else None
        yield Owner(f"account {job_qos.account(wanted, facts)}", row)


def _first(owners: list[Owner], field: str, name: str) -> tuple[Owner, int, bool] | None:
    """The limit that counts, whose it is, and whether nothing unknown comes before it."""
    sure = True
    for owner in owners:
        if owner.row is None:
            sure = False
        elif (limit := getattr(owner.row, field, {}).get(name)) is not None:
            return owner, limit, sure
    return None


def most(
    wanted: Wanted, partition: Partition, facts: SiteFacts, *, per_node: bool = False
) -> dict[str, int]:
    """The limit of each resource of a job, or of its share of a node, where Slurm enforces one."""
    if job_qos.enforced(facts, "limits") is False:
        return {}
    owners = list(_owners(wanted, partition, facts))
    fields = [PER_NODE] if per_node else [field for field in LIMITS if field != PER_NODE]
    rows = [(name, limit[1]) for name in wanted.tres() for field in fields
            if (limit := _first(owners, field, name))]  # fmt: skip
    return {name: min(n for other, n in rows if other == name) for name, _ in rows}


def _amount(name: str, count: int) -> str:
    """A number of a trackable resource, in words."""
    if name == "mem":
        return f"{count} MB of memory"
    if name in UNITS:
        return counted(count, UNITS[name])
    return f"{counted(count, 'GPU')} of the type {name.rpartition(':')[2]}"


def _most(wanted: Wanted, owners: list[Owner]) -> Iterator[Problem]:
    """More than a job can ever get."""
    for name, count in wanted.tres().items():
        for field, whose in LIMITS.items():
            limit = _first(owners, field, name)
            asked = count // wanted.nodes.min if field == PER_NODE else count
            if limit and asked > limit[1]:
                owner, highest, sure = limit
                what = f"{_amount(name, asked)} requested, but {owner.name} "
                what += f"allows at most {highest} for {whose}"
                hint = f"{FOR_EVER}use at most {highest}, or another account or QOS"
                key = wanted.memory_option[0] if name == "mem" else KEYS.get(name, "gpus")
                yield Problem(what, key, hint, sure)
                break


def _minutes(wanted: Wanted, owners: list[Owner]) -> Iterator[Problem]:
    """More of a resource, times the time limit, than a job may have."""
    if not wanted.option("time") or math.isinf(wanted.seconds):
        return
    for name, count in wanted.tres().items():
        limit = _first(owners, "max_minutes", name)
        if limit and name != "mem" and count * wanted.seconds / 60 > limit[1]:
            owner, highest, sure = limit
            what = f"{_amount(name, count)} for {wanted.option('time')} requested, but "
            what += f"{owner.name} allows at most {highest / 60:.6g} {name} hours for a job"
            minutes = highest // count
            hint = f"use --time {minutes} or less" if minutes else "use another account or QOS"
            yield Problem(what, "time", FOR_EVER + hint, sure)


def _least(wanted: Wanted, owners: list[Owner]) -> Iterator[Problem]:
    """Less than a QOS requires of a job."""
    count = {"gres/gpu": 0} | wanted.tres()
    for name in ("node", "gres/gpu", "cpu"):
        limit = _first(owners, "min_tres", name)
        asked = count.get(name, 0) // wanted.nodes.min * wanted.nodes.max
        if limit and asked < limit[1]:
            owner, least, sure = limit
            what = f"{_amount(name, asked)} requested, but {owner.name} "
            what += f"requires at least {least} per job"
            hint = f"{FOR_EVER}use at least {least}, or another QOS"
            yield Problem(what, KEYS.get(name, "gpus"), hint, sure)


def _wall(wanted: Wanted, owners: list[Owner]) -> Iterator[Problem]:
    """A longer time limit than a job may have. Slurm lowers the limit that it sets itself."""
    sure = True
    for owner in owners:
        sure = sure and owner.row is not None
        if owner.row and owner.row.max_wall:
            longest = owner.row.max_wall
            if wanted.option("time") and wanted.seconds > time_limit.seconds(longest, owner.name):
                what = f"time limit {wanted.option('time')} requested, but {owner.name} allows "
                hint = f"{FOR_EVER}use --time {longest} or less"
                yield Problem(what + longest, "time", hint, sure)
            return
