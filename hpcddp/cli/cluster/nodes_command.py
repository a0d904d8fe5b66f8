"""`hpcddp nodes`: the nodes that the user's runs had trouble with."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import click

from hpcddp.cli.terminal import say, tables
from hpcddp.errors import UserError
from hpcddp.keys import nearest

if TYPE_CHECKING:
    from hpcddp.planning.clusters import Profile
    from hpcddp.planning.trust.node_book import NodeBook
    from hpcddp.planning.trust.node_history import NodeHistory

SCHEMA_VERSION = 1
LONGEST = 365 * 86400.0  # seconds


@click.command()
@click.option("--trust", metavar="HOSTS", help="Use these nodes again, and forget their failures.")
@click.option("--avoid", metavar="HOSTS", help="Leave these nodes out of new jobs.")
@click.option("--for", "time_", metavar="TIME",
              help="Time for --avoid, in Slurm's form.  [default: 1-0]")  # fmt: skip
@click.option("--cluster", metavar="CLUSTER", default="auto", show_default=True,
              help="The cluster profile.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def nodes(
    trust: str | None, avoid: str | None, time_: str | None, cluster: str, as_json: bool
) -> None:
    """Show the nodes that your runs had trouble with, and which of them new jobs avoid.

    A node counts as bad if it failed, if it failed the checks at the start of a job or of `hpcddp
    doctor`, or if ranks on it were slow by their own work in two attempts. New jobs avoid it for an
    hour, and twice as long each further time, up to a week. They never avoid more than a tenth of
    the partition's nodes (but at least one), nor so many that a job could not start.
    """
    profile, book = _book(cluster)
    now = time.time()
    until = now + _time(time_, avoid)
    book.gather()
    trusted, avoided = _hosts(trust, "--trust"), _hosts(avoid, "--avoid")
    known = {row.host for row in book.histories()}
    _check(trusted, known, "--trust", "has no history", "`hpcddp nodes` lists all that have one")
    if there := _detected(profile):
        again = "`hpcddp cluster detect` reads the nodes again"
        _check(avoided, there | known, "--avoid", "is not a node of this cluster", again)
    for host in trusted:
        book.forgive(host, now)
    for host in avoided:
        book.leave_out(host, until)
    rows = [row for row in book.histories() if row.counted(now) or row.until(now) > now]
    if as_json:
        click.echo(json.dumps(_plain(book, rows, now)))
        return
    for line in _table(rows, now):
        click.echo(line)
    if not rows:
        say.note("no node had trouble in the last 30 days")


def _book(cluster: str) -> tuple[Profile, NodeBook]:
    """A profile, and the book of its cluster."""
    from hpcddp.planning import clusters
    from hpcddp.planning.asked import resolve
    from hpcddp.planning.trust.node_book import NodeBook, cluster_of

    name, heard = resolve(cluster, os.environ)
    profile = clusters.load(name, os.environ)
    if profile.cluster.backend != "slurm":
        hint = "run this where sbatch is, or name a cluster with --cluster"
        raise UserError("Slurm was not found", where="nodes", hint=hint)
    return profile, NodeBook.of(profile, os.environ, cluster_of(profile, heard))


def _time(text: str | None, avoid: str | None) -> float:
    """How long nodes are left out, in seconds."""
    from hpcddp.slurm import time_limit

    if text and avoid is None:
        raise UserError("requires --avoid", where="--for", hint="name the nodes with --avoid HOSTS")
    seconds = time_limit.seconds(text or "1-0", "--for")
    if not seconds <= LONGEST:
        hint = "use at most 365-0, a year; `hpcddp nodes --trust HOSTS` ends it before"
        raise UserError(f"{text} is too long", where="--for", hint=hint)
    return seconds


def _hosts(text: str | None, where: str) -> list[str]:
    """The hosts of an option."""
    from hpcddp.errors import TopologyError
    from hpcddp.slurm.hostlist import expand_hosts

    try:
        return expand_hosts(text or "")
    except TopologyError as error:
        raise UserError(error.what, where=where, hint=error.hint) from None


def _detected(profile: Profile) -> set[str]:
    """The nodes of the cluster when it was detected; none if it was not."""
    from hpcddp.errors import TopologyError
    from hpcddp.planning.site import site_facts
    from hpcddp.slurm.hostlist import expand_hosts

    facts = site_facts.load(profile.path)
    with contextlib.suppress(TopologyError):  # of a cluster that names nodes in its own way
        return (
            {host for kind in facts.kinds for host in expand_hosts(kind.hosts)} if facts else set()
        )
    return set()


def _check(hosts: Sequence[str], known: Collection[str], where: str, fault: str, hint: str) -> None:
    """Refuse nodes that are not known."""
    for host in hosts:
        if host not in known:
            near = nearest(host, known, what="node", many="check the name")
            hint = f"{near}; {hint}" if known else hint
            raise UserError(f"{host} {fault}", where=where, hint=hint)


def _table(rows: Sequence[NodeHistory], now: float) -> Iterator[str]:
    """The nodes, those that are avoided longest first."""
    if not rows:
        return
    texts = [("NODE", "AVOIDED UNTIL", "TIMES", "LAST")]
    for row in sorted(rows, key=lambda row: (-row.until(now), row.host)):
        until = row.until(now)
        moment = time.strftime("%a %d %b %H:%M %Z", time.localtime(until)) if until > now else "-"
        texts.append((row.host, moment, str(row.count(now)), row.why(now)))
    yield from tables.table(texts, right=(2,), wrap=True)


def _plain(book: NodeBook, rows: Sequence[NodeHistory], now: float) -> dict[str, object]:
    """The nodes as plain data; times in seconds since the epoch."""
    return {
        "schema_version": SCHEMA_VERSION,
        "folder": str(book.path),
        "nodes": [
            {"host": row.host, "until": row.until(now) if row.until(now) > now else None,
             "count": row.count(now), "why": row.why(now),
             "events": [event._asdict() for event in row.counted(now)]}
            for row in rows
        ],
    }  # fmt: skip
