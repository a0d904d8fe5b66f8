"""`hpcddp doctor`: check this machine and some nodes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcddp.cli.options import flags, job_options_except, json_option, runs_option, runs_root
from hpcddp.cli.terminal import say, tables
from hpcddp.cli.terminal.sections import SectionCommand, option
from hpcddp.errors import UserError
from hpcddp.sizes import counted, size

if TYPE_CHECKING:
    from hpcddp.doctor.check_finding import CheckFinding
    from hpcddp.planning.clusters import Profile
    from hpcddp.planning.site.site_facts import CheckUp
    from hpcddp.rundir import RunDir
    from hpcddp.submit.status import Status

SCHEMA_VERSION = 1
LEVELS = {"error": "red", "warning": "yellow"}  # their colours
SCALE = " ▁▂▃▄▅▆▇█"
OWN = ("`doctor` has a job of its own", "use `hpcddp submit` for a job of yours")
REFUSED = dict.fromkeys(("--set", "--strategy", "--launcher", "--name", "--no-snapshot"), OWN)


@click.command(cls=SectionCommand)
@job_options_except(REFUSED)
@option("Check", "--here", is_flag=True, help="Check this machine alone; submit nothing.")
@option("Check", "--results", metavar="RUN", help="Print the results of an earlier check-up.")
@json_option
@runs_option
def doctor(here: bool, results: str | None, as_json: bool, runs: str | None, **given: Any) -> int:
    """Check this machine, then some nodes with a short job, and say what to do.

    The job measures what training needs: GPUs, network, shared folder, clocks, the import of torch,
    the speed of each rank and of the links between nodes. It takes about a minute once it runs.

    The exit code is 1 if there is an error among the findings.
    """
    from hpcddp.doctor import check_job, diagnosis
    from hpcddp.doctor import here as checks

    if here and (other := _beside_here(results, given)):
        what = f"conflicts with {other}: --here checks this machine alone"
        raise UserError(what, where="--here", hint=f"leave {other} out, or --here")
    root = runs_root(runs, new=True)
    machine = checks.check(root) if results is None else None
    if machine and not as_json:
        for line in tables.fields(machine.rows, whole=["runs"]):
            click.echo(line)
    rows = list(machine.findings) if machine else []
    measured: dict[str, Any] | None = None
    if not here:
        run = _checked_up(root, results, given)
        measured = check_job.results(run, machine.versions if machine else None)
        rows += diagnosis.of(measured)
    if as_json:
        findings = [row._asdict() for row in rows]
        facts = dict(machine.rows) if machine else None
        click.echo(json.dumps({"schema_version": SCHEMA_VERSION, "here": facts,
                               "nodes": measured, "findings": findings}))  # fmt: skip
    else:
        for line in [*_nodes(measured or {}), *_network(measured or {}), *_findings(rows)]:
            click.echo(line)
    if measured:
        _remember(measured, run)
    return int(any(row.level == "error" for row in rows))


def _beside_here(results: str | None, given: dict[str, Any]) -> str:
    """An option of the job, which `--here` does not submit; "" for none."""
    if results is not None:
        return "--results"
    return next(iter(flags(given).sources.values()), "")


def _checked_up(root: Path, earlier: str | None, given: dict[str, Any]) -> RunDir:
    """The run of an earlier check-up, or of a new one, which is waited for."""
    from hpcddp.submit import submission

    if earlier is not None:
        return submission.find(root, earlier)
    run = _submitted(root, given)
    if {"RUNNING", "LOST"} <= _wait(run) and not run.all_attempts():
        _note_unseen(run)  # the script did not find its run
    return run


def _note_unseen(run: RunDir) -> None:
    """Note that the nodes do not see the folder of the runs: new jobs with it are refused."""
    from hpcddp.planning.site import site_facts

    say.warning(f"the job ran without finding its run: the nodes do not see {run.path.parent}")
    if profile := _profile(run):
        unseen = {run.path.parent: False}
        _keep(profile, site_facts.CheckUp(time.time(), unseen))


def _keep(profile: Profile, check: CheckUp) -> None:
    """Keep the results for later commands, or say that they are not kept."""
    from hpcddp.planning.site import site_facts

    if why := site_facts.add_check_up(profile.path, check):
        hint = "run `hpcddp cluster detect` first, then `hpcddp doctor` again"
        say.note(f"the results are not kept for later jobs: {why}\n  {hint}")


def _profile(run: RunDir) -> Profile | None:
    """The profile of a run's cluster; None on this machine."""
    from hpcddp import record
    from hpcddp.planning import clusters

    job = record.read(run)
    there = job.backend == "slurm" and Path(job.cluster).exists()
    return clusters.read(Path(job.cluster)) if there else None


def _remember(measured: dict[str, Any], run: RunDir) -> None:
    """Note what only the nodes could tell, and the bad ones, which later jobs avoid."""
    from hpcddp.attempt import ledger
    from hpcddp.attempt.nodes.node_events import CHECK, NodeEvent
    from hpcddp.doctor import check_job, diagnosis, node_summary
    from hpcddp.planning.software import software_facts
    from hpcddp.planning.trust.node_book import NodeBook

    if (profile := _profile(run)) is None:
        return
    software = check_job.software(run)
    check = node_summary.check_up(measured, run.path.parent, software_facts.place(software))
    _keep(profile, check)
    if not (bad := diagnosis.unfit(measured)):
        return
    source, now = f"doctor/{measured['time']}", measured["time"]
    events = [NodeEvent(host, CHECK, what, source, now) for host, what in bad.items()]
    attempt = ledger.last(run)
    cluster = str(attempt.site.get("cluster", "")) if attempt else ""
    NodeBook.of(profile, os.environ, cluster).add(events)
    say.note(f"new jobs avoid {', '.join(bad)} for some time; see `hpcddp nodes`")


def _submitted(root: Path, given: dict[str, Any]) -> RunDir:
    """The new run of a check-up."""
    from hpcddp.doctor import check_job
    from hpcddp.planning import plan as plans
    from hpcddp.planning.asked import Asked
    from hpcddp.submit import prepare, submission

    layer = check_job.layer(flags(given), os.environ)
    asked = Asked.read([layer], [], os.environ)
    asked.spec.command = check_job.command(asked.spec)
    plan = plans.make(asked, environ=os.environ, folder=Path.cwd())
    for note in plan.notes:
        say.note(note)
    run = prepare.new_run(plan, root)
    job_id = submission.submit(plan, run, new=True, note=say.note)
    size = f"{counted(plan.nodes.max, 'node')}, {counted(plan.gpus, 'rank')} each"
    say.note(f"checking {size}: job {job_id}, run {run.name}")
    return run


def _wait(run: RunDir) -> set[str]:
    """Wait for the job, and return its states; Ctrl-C leaves it running."""
    from hpcddp.cli.terminal.follow import wait

    shown, states = "", set[str]()

    def seen(state: Status) -> None:
        nonlocal shown
        states.add(state.state)
        text = f"{state.state}: {state.reason}" if state.reason else state.state
        if text != shown and not state.final:
            say.note(text)
        shown = text

    try:
        wait(run, lambda: None, seen)
    except KeyboardInterrupt:
        say.note(f"the job continues; `hpcddp doctor --results {run.name}` prints its results")
        raise
    return states


def _findings(rows: Sequence[CheckFinding]) -> Iterator[str]:
    """The findings, with what to do."""
    if not rows:
        yield "no problems found"
    for row in rows:
        level = say.paint(f"{row.level}:", LEVELS[row.level])
        yield f"{level} {row.where}: {row.what}"
        yield from tables.wrapped(row.hint)


def _nodes(measured: dict[str, Any]) -> Iterator[str]:
    """A table of the nodes."""
    from hpcddp.doctor import node_summary

    if measured:
        yield ""
        yield from tables.table([node_summary.HEAD, *node_summary.table(measured)])


def _network(measured: dict[str, Any]) -> Iterator[str]:
    """All-reduce by size, the speed of the ranks, and a picture of the links between nodes."""
    from hpcddp.doctor import diagnosis, links

    if not measured:
        return
    rates = measured["rates"]
    unit = "TFLOP/s" if max(rates) > 1e12 else "GFLOP/s"
    low, high = (f(rates) / (1e12 if unit == "TFLOP/s" else 1e9) for f in (min, max))
    yield f"\nspeed     {low:.3g} to {high:.3g} {unit} for each of {counted(len(rates), 'rank')}"
    if (count := sum("host" in row for row in measured["ranks"])) > links.MOST_NODES:
        say.note(f"links are measured between at most {links.MOST_NODES} nodes, not {count}")
    if measured["all_reduce"]:
        yield ""
        head = ("ALL-REDUCE", "TIME", "BUS BANDWIDTH")
        yield from tables.table([head, *diagnosis.table_of_sizes(measured)], right=(1, 2))
    if len(measured["pairs"]) > 1:
        yield ""
        yield from _picture(measured)
    yield ""


def _picture(measured: dict[str, Any]) -> Iterator[str]:
    """The bandwidth of each pair of nodes as a square of blocks."""
    hosts = {row["node"]: row["host"] for row in measured["ranks"] if "host" in row}
    speeds = {(a, b): speed for a, b, speed in measured["pairs"]}
    fastest = max(speeds.values())
    yield f"bandwidth between nodes ({SCALE[-1]} = {size(fastest)}/s)"
    width = max(map(len, hosts.values()))
    for node, host in sorted(hosts.items()):
        cells = ""
        for other in sorted(hosts):
            speed = speeds.get((min(node, other), max(node, other)), 0.0)
            cells += "·" if node == other else SCALE[round(speed / fastest * (len(SCALE) - 1))]
        yield f"  {host:{width}} {cells}"
