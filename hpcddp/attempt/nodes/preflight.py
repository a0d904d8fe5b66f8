"""The preflight: the nodes of an attempt are checked while its ranks start.

A step of the job checks each node (``node_check``). A node that fails twice ends the attempt, and
the next one does without it. It runs on the batch script's host, beside the ranks' launcher.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from hpcddp import record
from hpcddp.attempt import error_record, launch_facts, ledger
from hpcddp.attempt.ledger import Attempt
from hpcddp.attempt.nodes import bad_nodes, node_check, node_events
from hpcddp.attempt.rendezvous import alive
from hpcddp.errors import NodeUnfit
from hpcddp.record import JobRecord
from hpcddp.rundir import RunDir, parse_lines, write_json
from hpcddp.sizes import counted
from hpcddp.slurm import steps
from hpcddp.slurm.hostlist import expand_hosts
from hpcddp.slurm.hostlist_writer import compress_hosts

TIMEOUT = 60.0  # seconds for all nodes; one that does not answer is not judged
CLOCK = 10.0  # seconds by which a node's clock may differ from this one's

# On a node: the check, or what it would say of a run folder that is not there.
_SEES = r"""[ -r "$1" ] || {
  printf '{"host": "%s", "time": %s, "gpus": null, "faults": ["does not see the run folder"]}\n' \
    "$SLURMD_NODENAME" "$(date +%s)"
  exit
}
shift
exec "$@"
"""

Faults = dict[str, list[str]]


def check(run: RunDir, number: int, launched: int, first: str) -> None:
    """Check the nodes of an attempt; end its ranks if a node fails twice and can be avoided.

    Args:
        launched: process id of the launcher, which passes signals on to the ranks.
        first: the address at which the first node's rank listens.
    """
    mine, job = ledger.read(run.attempt(number)), record.read(run)
    hosts = expand_hosts(ledger.all_nodes(run.attempt(number))) if mine and mine.slurm else []
    if mine and hosts:  # srun would wait for a node that is lost
        left_out = {*bad_nodes.barred(run, job, mine), *bad_nodes.lost(run, mine)}
        hosts = [host for host in hosts if host not in left_out]
    if mine is None or len(hosts) < 2:
        return
    wanted = _wanted(job, os.environ)
    once = _own(_ask(run, mine, hosts, first, wanted), len(hosts))
    twice = _ask(run, mine, sorted(once), first, wanted) if once else {}
    for host in sorted(set(once) - set(twice)):
        _say(f"{host}: {once[host][0]}; a second check found nothing")
    if twice:
        _conclude(run, mine, job, twice, launched)


def _wanted(job: JobRecord, environ: Mapping[str, str]) -> int | None:
    """GPUs of a node that the job asked for; 0 for none. None if Slurm did not give it any: where
    Slurm does not count GPUs, the ranks use all that they see."""
    if job.spec.get("device") == "cpu":
        return 0
    count = environ.get("SLURM_GPUS_ON_NODE", "")
    return int(count) if count.isdecimal() else None


def _ask(
    run: RunDir, mine: Attempt, hosts: Sequence[str], first: str, wanted: int | None
) -> Faults:
    """The faults of some nodes, by a step on them; none of a node that does not answer."""
    gpus = [] if wanted is None else [str(wanted)]
    words = steps.on_node(str(run.host), "check-node", str(run.path), str(mine.number), first,
                          node_check.boot_id(), *gpus)  # fmt: skip
    words = ["/bin/sh", "-c", _SEES, "sh", str(run.host), *words]
    begin = time.time()
    out, _ = steps.output(
        steps.step(
            mine.said_id or mine.job_id, compress_hosts(hosts), len(hosts), words, mine.release
        ),
        TIMEOUT,
    )  # fmt: skip
    rows = {str(row["host"]): row for row in parse_lines(out.splitlines()) if "host" in row}
    return judged(rows, begin, time.time(), wanted or 0)


def _own(faults: Faults, count: int) -> Faults:
    """The faults that are a node's own: what most nodes have is so at this site, or of the job.

    Args:
        count: of all nodes.
    """
    many = Counter(key for texts in faults.values() for key in {_key(text) for text in texts})
    common = {key for key, times in many.items() if 2 * times > count}
    if common:
        texts = {_key(text): text for texts in faults.values() for text in texts}
        _say(f"most nodes: {', '.join(texts[key] for key in sorted(common))}")
    own = {host: [text for text in texts if _key(text) not in common]
           for host, texts in faults.items()}  # fmt: skip
    return {host: texts for host, texts in own.items() if texts}


def _key(text: str) -> str:
    """A fault without its numbers, which may differ from node to node."""
    return re.sub(r"[+-]?\d+", "N", text)


def judged(rows: Mapping[str, Mapping[str, Any]], begin: float, end: float, wanted: int) -> Faults:
    """The faults of nodes, also those that only a comparison shows.

    Args:
        rows: host -> its answer; ``gpus`` is None without a driver, and negative if that did not
            answer in time.
        begin: when they were asked, by this node's clock, in seconds since the epoch; end: when
            all had answered.
        wanted: GPUs of a node that the job asked for; 0 for none.
    """
    most = max((row["gpus"] or 0 for row in rows.values()), default=0)
    needed = min(wanted, most)  # slices of GPUs are not counted as such
    faults: Faults = {}
    for host, row in rows.items():
        texts = [str(text) for text in row["faults"]]
        if row["gpus"] is not None and 0 <= row["gpus"] < needed:
            texts.append(f"has {row['gpus']} of {counted(needed, 'GPU')}")
        elif row["gpus"] is None and needed:
            texts.append("its GPU driver does not answer, as those of other nodes do")
        ahead = max(row["time"] - end, 0.0) or min(row["time"] - begin, 0.0)
        if abs(ahead) > CLOCK:
            texts.append(f"its clock differs by {ahead:+.0f} s")
        if texts:
            faults[host] = texts
    return faults


def _conclude(run: RunDir, mine: Attempt, job: JobRecord, faults: Faults, launched: int) -> None:
    """End the attempt, unless it keeps the nodes. A spare is only not used."""
    train = {*_training(run, mine, job, launched)}
    if spares := {host: faults[host] for host in faults.keys() - train}:
        _say(f"{bad_nodes.in_words(spares)}; not used as a spare")
        write_json(run.attempt(mine.number).unfit, {"hosts": sorted(spares)})
        node_events.record_checks(run, mine.number, spares)
        faults = {host: texts for host, texts in faults.items() if host in train}
    if not faults:
        return
    if bad_nodes.are_kept(run, mine.number, faults, job):
        return
    text = bad_nodes.in_words(faults)
    _say(f"{text}; the attempt ends, and the next one avoids these nodes")
    facts = {"host": compress_hosts(sorted(faults)), "bad_host": True, "faults": faults}
    error_record.report_for_all(run.attempt(mine.number), NodeUnfit.kind, text, **facts)
    with suppress(ProcessLookupError):
        os.kill(launched, signal.SIGTERM)


def _training(run: RunDir, mine: Attempt, job: JobRecord, launched: int) -> list[str]:
    """The nodes whose ranks train, once that is known: with spares, only when the ranks start."""
    folder = run.attempt(mine.number)
    hosts = expand_hosts(ledger.all_nodes(folder))
    parents = launch_facts.of(job.launcher, job.launch).get("spares")
    if parents and (len(hosts) > job.nodes[1] or job.spec.get("spares")):
        while not folder.hosts.exists() and alive(launched):
            time.sleep(0.1)
    return expand_hosts((ledger.read(folder) or mine).nodes)


def _say(text: str) -> None:
    print(f"hpcddp: {text}", flush=True)
