"""Before submission: whether a job fits what Slurm said of the cluster, and what would fit.

What Slurm did not say refuses nothing. What a user forces with --sbatch, and what recorded facts of
more than a day ago say, is a note.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hpcddp.errors import ClusterError
from hpcddp.keys import nearest
from hpcddp.planning.site import node_choice
from hpcddp.planning.site.cluster_now import ClusterNow
from hpcddp.planning.site.profile_writer import stamp
from hpcddp.planning.site.site_facts import DAY, SiteFacts
from hpcddp.sizes import NodeRange, bytes_of, counted
from hpcddp.slurm import time_limit
from hpcddp.slurm.accounts import Association, Qos
from hpcddp.slurm.node_kinds import NodeKind
from hpcddp.slurm.partitions import Partition
from hpcddp.spec import JobSpec

TRES = {"node": "nodes", "gres/gpu": "GPUs", "cpu": "CPUs"}
FORCED = "--sbatch"  # the source of a value that only warns
MB = 1024**2


@dataclass(frozen=True)
class Wanted:
    """What a job asks for.

    Args:
        gpus: per node; 0 if it requests none.
        gpu_type: "" for any.
        cpus: per node.
    """

    job: JobSpec
    sources: Mapping[str, str]
    nodes: NodeRange
    gpus: int
    gpu_type: str
    cpus: int

    def option(self, name: str) -> str:
        """The value of an sbatch option; "" without one, and for false, which leaves it out."""
        value = self.job.slurm.get(name, "")
        return "" if value is False else str(value)

    def source(self, name: str) -> str:
        """Where a value was set."""
        return self.sources.get(name) or self.sources.get(f"slurm.{name}") or name

    @property
    def seconds(self) -> float:
        """The time limit; infinity for none."""
        return time_limit.seconds(self.option("time") or "0", self.source("time"))


@dataclass(frozen=True)
class Problem:
    """Something in which a job does not fit.

    Args:
        what: of one line.
        key: the value that is too much.
        hint: what would fit.
        sure: False for what only makes the job wait.
    """

    what: str
    key: str
    hint: str
    sure: bool = True


def check(wanted: Wanted, now: ClusterNow, facts: SiteFacts | None) -> list[str]:
    """Notes for the user about a job that fits, or may fit.

    Args:
        facts: those that were recorded with the profile.

    Raises:
        ClusterError: the first problem for which Slurm would refuse the job, or let it wait for
            ever.
    """
    notes = []
    for problem in (*_present(wanted, now), *_recorded(wanted, now, facts)):
        source = wanted.source(problem.key)
        if problem.sure and source != FORCED:
            raise ClusterError(problem.what, where=source, hint=problem.hint)
        notes.append(f"{problem.what}: {problem.hint}" if problem.hint else problem.what)
    return notes


def _present(wanted: Wanted, now: ClusterNow) -> Iterator[Problem]:
    """Problems by what Slurm says now."""
    names = [name for name in wanted.option("partition").split(",") if name]
    known = [row.name for row in now.partitions]
    for name in names:
        if known and name not in known:
            hint = nearest(name, known, what="partition")
            yield Problem(f"unknown partition {name!r}", "partition", hint)
    if now.site and now.site.routed and not names:
        return  # a plugin chooses the partition
    rows = now.wanted(wanted.job)
    if len(rows) == 1:  # Slurm takes any of several that fits
        yield from _partition(wanted, rows[0])
    kinds = now.kinds_for(wanted.job, wanted.gpus, wanted.gpu_type)
    if rows and kinds:
        yield from _nodes(wanted, ",".join(row.name for row in rows), kinds)


def _partition(wanted: Wanted, row: Partition) -> Iterator[Problem]:
    """Problems with the limits of a partition."""
    if row.state != "UP":
        text = f"partition {row.name} is {row.state}"
        yield Problem(text, "partition", "the job waits until it is up", sure=False)
    if row.max_nodes is not None and wanted.nodes.min > row.max_nodes:
        what = f"{wanted.nodes.min} nodes requested, but partition {row.name} allows a job "
        what += str(row.max_nodes)
        yield Problem(what, "nodes", f"use --nodes {row.max_nodes} or fewer")
    if row.max_time and wanted.option("time"):
        most = time_limit.seconds(row.max_time, row.name)
        if wanted.seconds > most:
            what = f"time limit {wanted.option('time')} requested, but partition {row.name} allows "
            yield Problem(what + row.max_time, "time", f"use --time {row.max_time} or less")
    account = wanted.option("account")
    if account and _denied(account, row.accounts, row.denied_accounts):
        what = f"account {account} may not use partition {row.name}"
        hint = f"use one of {', '.join(row.accounts[:8])}" if row.accounts else "use another one"
        # Slurm also admits the accounts below those of its list.
        yield Problem(what, "account", hint, sure=account in row.denied_accounts)
    qos = wanted.option("qos")
    if qos and _denied(qos, row.qos, row.denied_qos):
        hint = f"use one of {', '.join(row.qos[:8])}" if row.qos else "use another one"
        yield Problem(f"QOS {qos} may not be used in partition {row.name}", "qos", hint)


def _denied(name: str, allowed: Collection[str], denied: Collection[str]) -> bool:
    """Whether a partition denies an account or a QOS; without a list it allows all."""
    return name in denied or bool(allowed and name not in allowed)


class _Requirement(NamedTuple):
    """What each node of a job must have.

    Args:
        shown: what a node has of it, in words.
    """

    text: str
    key: str
    fits: Callable[[NodeKind], bool]
    shown: Callable[[NodeKind], str]


def _needs(wanted: Wanted) -> Iterator[_Requirement]:
    """What a job needs of each node, in the order in which it is told."""
    kind, gpus, memory = wanted.gpu_type, wanted.gpus, _memory(wanted)
    if gpus and kind:
        yield _Requirement(
            f"GPUs of the type {kind}", "gpu_type", lambda node: node_choice.count(node, kind) > 0,
            lambda node: ", ".join(row.type for row in node.gpus if row.type),
        )  # fmt: skip
    if gpus:
        yield _Requirement(
            f"{counted(gpus, 'GPU')} per node", "gpus",
            lambda node: node_choice.count(node, kind) >= gpus,
            lambda node: counted(node_choice.count(node, kind), "GPU"),
        )  # fmt: skip
    yield _Requirement(f"{counted(wanted.cpus, 'CPU')} per node", "cpus-per-task",
                lambda node: node.cpus >= wanted.cpus,
                lambda node: f"{node.cpus} CPUs")  # fmt: skip
    yield _Requirement(f"{wanted.option('mem')} of memory per node", "mem",
                lambda node: node.memory_mb >= memory,
                lambda node: f"{node.memory_mb / 1024:.0f} GB")  # fmt: skip


def _nodes(wanted: Wanted, where: str, kinds: Sequence[NodeKind]) -> Iterator[Problem]:
    """Problems with the nodes of the job's partitions."""
    have = list(kinds)
    for need in _needs(wanted):
        left = [kind for kind in have if need.fits(kind)]
        if not left:
            there = ", ".join(dict.fromkeys(filter(None, map(need.shown, have)))) or "none"
            what = f"{need.text} requested, but the nodes of partition {where} have {there}"
            yield Problem(what, need.key, "use less, or another partition")
            return
        have = left
    total, up = sum(kind.nodes for kind in have), sum(kind.usable for kind in have)
    least = counted(wanted.nodes.min, "node")
    if wanted.nodes.min > total:
        what = f"{least} requested, but partition {where} has {total} with what the job asks for"
        yield Problem(what, "nodes", f"use --nodes {total} or fewer")
    elif wanted.nodes.min > up:
        what = f"{least} requested, but {up} of {total} in partition {where} are up"
        yield Problem(what, "nodes", "the job waits until more are", sure=False)


def _memory(wanted: Wanted) -> int:
    """Memory of each node in MB; 0 for none. As in sbatch, a number alone is MB."""
    text = wanted.option("mem")
    if not text or text == "0":
        return 0
    text = f"{text}M" if text.isdecimal() else text
    return math.ceil(bytes_of(text, wanted.source("mem"), what="memory") / MB)


def _recorded(wanted: Wanted, now: ClusterNow, facts: SiteFacts | None) -> Iterator[Problem]:
    """Problems by what was recorded with the profile."""
    if facts is None:
        return
    old = facts.age > DAY
    more = f" (read {stamp(facts.read)}; `hpcddp cluster detect` reads it again)" if old else ""
    for problem in (*_account(wanted, facts), *_limits(wanted, facts)):
        yield Problem(problem.what + more, problem.key, problem.hint, problem.sure and not old)
    yield from _maintenance(wanted, now, facts)


def _account(wanted: Wanted, facts: SiteFacts) -> Iterator[Problem]:
    def enforced(word: str) -> bool:
        words = facts.config.get("AccountingStorageEnforce", "").lower().split(",")
        return word in words or "all" in words

    account, own = wanted.option("account"), {row.account for row in facts.associations}
    if account and own and account not in own:
        hint = nearest(account, own, what="account")
        what = f"account {account!r} is none of yours"
        yield Problem(what, "account", hint, sure=enforced("associations"))
    used = account or facts.default_account
    rows = [row for row in facts.associations if row.account == used]
    may = {name for row in rows for name in row.qos}
    qos = wanted.option("qos")
    known = {row.name for row in facts.qos}
    if qos and may and qos in known and qos not in may:  # a plugin may know other names
        hint = nearest(qos, may, what="QOS")
        what = f"QOS {qos!r} may not be used with account {used}"
        yield Problem(what, "qos", hint, sure=enforced("qos"))


def _limits(wanted: Wanted, facts: SiteFacts) -> Iterator[Problem]:
    """The limits of a job by its account, its QOS and that of its partition.

    Which of them counts depends on flags of the QOS, so they are told and refuse nothing.
    """
    used = wanted.option("account") or facts.default_account
    places = {"", *wanted.option("partition").split(",")}
    rows: list[tuple[str, Association | Qos]] = [
        (f"account {used}", row) for row in facts.associations
        if row.account == used and row.partition in places
    ]  # fmt: skip
    partition = facts.partition(wanted.option("partition"))
    names = {wanted.option("qos"), partition.own_qos if partition else ""} - {""}
    rows += [(f"QOS {row.name}", row) for row in facts.qos if row.name in names]
    asked = {"node": wanted.nodes.min, "gres/gpu": wanted.nodes.min * wanted.gpus,
             "cpu": wanted.nodes.min * wanted.cpus}  # fmt: skip
    for owner, row in rows:
        for name, count in asked.items():
            most = row.max_tres.get(name)
            if most is not None and count > most:
                what = f"{count} {TRES[name]} requested, but {owner} allows a job {most}"
                hint = "use fewer, or another account or QOS, if it waits for ever"
                yield Problem(what, "nodes", hint, sure=False)
        longest = time_limit.seconds(row.max_wall or "0", owner)
        if wanted.option("time") and wanted.seconds > longest:
            what = f"time limit {wanted.option('time')} requested, but {owner} allows "
            hint = f"use --time {row.max_wall} or less, if it waits for ever"
            yield Problem(what + row.max_wall, "time", hint, sure=False)


def _maintenance(wanted: Wanted, now: ClusterNow, facts: SiteFacts) -> Iterator[Problem]:
    """A time limit that runs into a maintenance window: the job would wait for its end."""
    limit = wanted.option("time") or (now.site.limit if now.site else "")
    seconds = time_limit.seconds(limit or "0", wanted.source("time"))
    begin = time.time()
    for window in facts.reservations:
        if window.maintenance and not window.hosts and begin < window.start < begin + seconds:
            left = int((window.start - begin) // 60)
            text = f"maintenance from {stamp(window.start)} to {stamp(window.end)}"
            hint = (
                f"a job with a time limit of more than {counted(left, 'minute')} waits for its end"
            )
            yield Problem(text, "time", hint, sure=False)
