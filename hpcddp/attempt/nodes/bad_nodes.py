"""Which nodes the next attempt of a run avoids."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Mapping, Sequence

from hpcddp.attempt import decision, first_failure, launch_facts, ledger
from hpcddp.attempt.error_record import is_shared
from hpcddp.attempt.ledger import Attempt
from hpcddp.attempt.nodes import node_events
from hpcddp.errors import HpcddpError, NodeUnfit, SlurmUnreachable
from hpcddp.record import JobRecord
from hpcddp.rundir import RunDir, read_json, read_step
from hpcddp.slurm import commands as slurm
from hpcddp.slurm import hostlist
from hpcddp.slurm.hostlist_writer import compress_hosts

ANSWER = 15.0  # seconds for one answer of Slurm
WINDOW = 1000  # steps within which a second failure of a node counts


def excluded(run: RunDir, job: JobRecord) -> str | None:
    """The nodes to exclude from the next attempt, in Slurm's form: the job's own, and those that
    failed since the last progress. None for those of the job as it is now, "" for none.

    Never so many that too few are left: the oldest are used again first.
    """
    asked = bool(job.spec.get("requeue", {}).get("exclude_bad_nodes"))
    attempts = ledger.attempts(run)
    bad = barred(run, job, attempts[-1]) if attempts else []
    for attempt in reversed(attempts):
        host = bad_host(run, attempt, job, certain=not asked)
        bad += [name for name in [host] if name and name not in bad]
        if attempt.progress:
            break
    own = _own(job, time.time())
    if bad and (bad := spared(run, bad, job)):
        return ",".join(filter(None, [own, *bad]))
    # A job keeps what was excluded from an earlier attempt of it, or when it was submitted.
    same = [x for x in attempts[:-1] if attempts[-1].job_id in (x.job_id, x.successor)]
    return own if any(x.exclude is not None for x in same) else still_excluded(job)


def barred(run: RunDir, job: JobRecord, mine: Attempt) -> list[str]:
    """The nodes of an attempt's allocation that are not used again in it: those that failed for
    certain, to which two failures within WINDOW steps point, or one before they came to a step, at
    all or after a restart in place; to which any failure points, where the job avoids such ones."""
    asked = bool(job.spec.get("requeue", {}).get("exclude_bad_nodes"))
    last: dict[str, int] = {}
    stepped: set[str] = set()
    bad: dict[str, None] = {}
    again = False  # the attempt is a restart in place
    for attempt in ledger.attempts(run):
        if attempt.allocation != mine.allocation:
            continue
        folder, hosts = run.attempt(attempt.number), {*hostlist.expand_hosts(attempt.nodes)}
        bad |= dict.fromkeys((read_json(folder.unfit) or {}).get("hosts", ()))
        step = read_step(folder)[0]
        came = step > (attempt.checkpoint or 0) or job.spec.get("command")  # else steps are unknown
        if came:
            stepped |= hosts
        certain = bad_host(run, attempt, job, certain=not asked)
        blamed = certain or ("" if is_shared(folder) else bad_host(run, attempt, job))
        for host in hosts & {*(hostlist.expand_hosts(blamed) if blamed else ())}:
            early = host not in stepped or (again and not came)
            if certain or early or step - last.get(host, -WINDOW) < WINDOW:
                bad[host] = None
            last[host] = step
        again = attempt.action == decision.HERE
    return [*bad]


def still_excluded(job: JobRecord) -> str | None:
    """The nodes to exclude of those that the script excludes; None for all of them."""
    own = _own(job, time.time())
    return None if own == _own(job, 0.0) else own


def _own(job: JobRecord, now: float) -> str:
    """The host list of the job's own option, and of the nodes that new jobs still avoid.

    Args:
        now: in seconds since the epoch; 0 for what the script excludes.
    """
    asked = str(job.spec.get("slurm", {}).get("exclude", ""))
    left_out = (host for host, until in job.left_out.items() if until > now)
    return ",".join(filter(None, [asked, *left_out]))


def are_kept(run: RunDir, number: int, faults: Mapping[str, Sequence[str]], job: JobRecord) -> bool:
    """Whether an attempt continues on nodes that failed their checks, as the next one could not
    avoid them. If so, the log says why, and other jobs may still avoid the nodes.

    Args:
        faults: host -> its faults, in words.
    """
    if why := _why_kept(run, number, sorted(faults), job):
        node_events.record_checks(run, number, faults)
        print(f"hpcddp: {in_words(faults)}; the ranks continue: {why}", flush=True)
    return bool(why)


def _why_kept(run: RunDir, number: int, hosts: Sequence[str], job: JobRecord) -> str:
    if _left_here(run, number, hosts, job):
        return ""
    if again := sorted({*hosts} & {*blamed(run, number - 1)}):
        return f"Slurm gave {compress_hosts(again)} again"
    if not job.spec.get("requeue", {}).get("enabled", True):
        return "requeue.enabled is false"
    # A container has no sinfo. The batch script, outside of it, chooses the nodes later.
    if shutil.which("sinfo") and len(spared(run, hosts, job)) < len(hosts):
        return "no other node can take the place"
    return ""


def _left_here(run: RunDir, number: int, hosts: Sequence[str], job: JobRecord) -> bool:
    """Whether the next attempt has enough other nodes in the allocation."""
    row, policy = launch_facts.of(job.launcher, job.launch), job.spec.get("requeue", {})
    if not (row.get("spares") and policy.get("here") and policy.get("enabled", True)):
        return False
    mine, all_hosts = ledger.read(run.attempt(number)), ledger.all_nodes(run.attempt(number))
    bad = {*hosts, *(barred(run, job, mine) if mine else ()), *lost(run, mine)}
    return len({*hostlist.expand_hosts(all_hosts)} - bad) >= job.nodes[0]


def lost(run: RunDir, mine: Attempt | None) -> set[str]:
    """The nodes of this allocation that the attempt before could not leave to this one, or this one
    to the next."""
    if not mine:
        return set()
    lost, every = set(), {*hostlist.expand_hosts(ledger.all_nodes(run.attempt(mine.number)))}
    for number in (mine.number - 1, mine.number):
        attempt = ledger.read(run.attempt(number)) if number else None
        if attempt and attempt.allocation == mine.allocation:
            failed = read_json(run.attempt(number).failed) or {}
            lost |= every - {*failed["usable"]} if failed.get("usable") else set()
    return lost


def in_words(faults: Mapping[str, Sequence[str]]) -> str:
    """The faults of some nodes, for the log."""
    return "; ".join(f"{host}: {', '.join(faults[host])}" for host in sorted(faults))


def blamed(run: RunDir, number: int) -> list[str]:
    """The nodes whose failed checks ended an attempt."""
    error = (read_json(run.attempt(number).error) if number > 0 else None) or {}
    failed = error.get("kind") == NodeUnfit.kind
    return hostlist.expand_hosts(str(error.get("host", ""))) if failed else []


def spared(run: RunDir, bad: Sequence[str], job: JobRecord) -> list[str]:
    """Those of some host lists, newest first, without which the job can still start."""
    own = _own(job, time.time())
    partition = str(job.spec.get("slurm", {}).get("partition", "")).partition(",")[0]
    try:
        usable = _usable(partition or os.environ.get("SLURM_JOB_PARTITION", ""))
        usable -= set(hostlist.expand_hosts(own)) if own else set()
        usable -= lost(run, ledger.last(run))  # Slurm may not know it yet
    except HpcddpError as error:
        print(f"hpcddp: no node is excluded: {error.what}", flush=True)
        return []
    kept, least = [], job.nodes[0] + int(job.spec.get("spares", 0))
    for hosts in bad:
        left = usable - set(hostlist.expand_hosts(hosts))
        if len(left) >= least:
            usable = left
            kept.append(hosts)
    with contextlib.suppress(SlurmUnreachable):
        # Other nodes may lack the job's GPUs. A job that Slurm refuses anyway does not count.
        while kept and not _taken(run, [own, *kept]) and _taken(run, [own]):
            print(f"hpcddp: {kept[-1]} is used again: too few other nodes fit the job", flush=True)
            kept.pop()
    return kept


def is_down(host: str, timeout: float) -> bool:
    """Whether Slurm can give no job a node now, of this job's partition.

    Raises:
        SlurmUnreachable: there is no answer in ``timeout`` seconds.
    """
    usable = _usable(os.environ.get("SLURM_JOB_PARTITION", ""), timeout)
    return bool(usable) and host not in usable  # a hidden partition shows no node


def _usable(partition: str, timeout: float = slurm.TIMEOUT) -> set[str]:
    """The nodes of a partition that can run jobs now or soon; of all, without a name."""
    lists = slurm.usable_nodes(partition, timeout)
    return {host for hosts in lists for host in hostlist.expand_hosts(hosts)}


def _taken(run: RunDir, left_out: list[str]) -> bool:
    return slurm.takes(run.script, ",".join(filter(None, left_out)), ANSWER)


def bad_host(run: RunDir, mine: Attempt, job: JobRecord, *, certain: bool = False) -> str:
    """The node that an attempt's failure points to, if any; or the nodes that failed.

    Args:
        certain: only if the ranks have compared themselves, and found it.
    """
    failure = read_json(run.attempt(mine.number).error) or {}
    if certain:
        return str(failure.get("host", "")) if failure.get("bad_host") else ""
    if failure and failure.get("kind") != "peer":
        return str(failure.get("host", ""))
    first = first_failure.failed(run, mine.number, job)
    return first.host if first else ""
