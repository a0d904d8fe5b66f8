"""`hpcddp init`: a job file for this project, and a profile for this cluster."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcddp.cli.cluster import detection_notes
from hpcddp.cli.terminal import say
from hpcddp.errors import UserError
from hpcddp.sizes import parse_count, parse_nodes

if TYPE_CHECKING:
    from hpcddp.planning.project.new_job import JobSize, NewJob
    from hpcddp.planning.project.project_look import ScriptFile
    from hpcddp.planning.site.detected import Detected
    from hpcddp.planning.site.site_facts import SiteFacts


@click.command()
@click.argument("script", required=False, type=click.Path())
@click.option("--nodes", "-N", metavar="N", help="Number of nodes, or a range such as 1-4.")
@click.option("--gpus", metavar="GPUS", help="GPUs per node: 4, or a100:4.  [default: all]")
@click.option("--yes", "-y", is_flag=True, help="Ask nothing.")
@click.option("--force", is_flag=True, help="Replace a job file that differs.")
def init(script: str | None, nodes: str | None, gpus: str | None, yes: bool, force: bool) -> None:
    """Write a job file for the project in this folder, and a profile for this cluster.

    SCRIPT is the script that trains. [default: the likeliest one of this folder]

    It reads the scripts, and the cluster from Slurm. It runs nothing. It keeps your changes to the
    profile, and a job file that differs.
    """
    from hpcddp.planning.project import new_job

    parse_nodes(nodes or "1", where="--nodes")  # before anything is written
    kind, _, each = (gpus or "").rpartition(":")
    parse_count(each or "1", "GPUs per node", where="--gpus")
    ask = not yes and sys.stdin.isatty() and sys.stdout.isatty()
    chosen = _script(script, Path.cwd(), ask)
    site = _cluster()
    size = _size(site.facts if site else None, nodes, each or None, kind, ask)
    job = new_job.of(chosen, Path.cwd(), size)
    _check(job, force)
    job.make_folder()  # if that fails, nothing is written
    if site:
        _write_profile(site)
    _write(job)
    if page := new_job.PAGES.get(chosen.kind):
        say.note(f'{chosen.path} uses {chosen.kind}: see the page "{page}" of the documentation')
    click.echo(f"next      hpcddp submit {job.path.stem}")


def _script(named: str | None, folder: Path, ask: bool) -> ScriptFile:
    """The script to run: as named, or chosen, or the likeliest one."""
    from hpcddp.planning.project import project_look

    if named is not None:
        return project_look.named(folder, named)
    rows = project_look.candidates(folder)
    if not rows:
        hint = "name it: `hpcddp init SCRIPT`"
        raise UserError("no script that trains with torch here", where=str(folder), hint=hint)
    if len(rows) == 1 or not ask:
        click.echo(f"script    {rows[0].path} ({rows[0].kind})")
        return rows[0]
    for number, row in enumerate(rows[:9], 1):
        click.echo(f"  {number}  {row.path} ({row.kind})")
    picked = click.prompt("script", type=click.IntRange(1, min(9, len(rows))), default=1)
    return rows[int(picked) - 1]


def _cluster() -> Detected | None:
    """This cluster, whose profile is not written yet; None without Slurm."""
    from hpcddp.planning.asked import resolve
    from hpcddp.planning.site import detected

    if resolve("auto", os.environ)[0] == "local":
        say.note("Slurm not found: no profile is written, and the job runs on this machine")
        return None
    return detected.detect("", os.environ)


def _write_profile(site: Detected) -> None:
    """Write the profile of the cluster, and show it."""
    site.save()
    detection_notes.show(site)
    click.echo(f"profile   {site.path}" + ("" if site.changed else " (unchanged)"))
    if site.changed:
        _show(site.profile.text)


def _size(
    facts: SiteFacts | None, nodes: str | None, gpus: str | None, kind: str, ask: bool
) -> JobSize:
    """Nodes, GPUs of each and their type, and the device of the ranks."""
    from hpcddp.planning.project.new_job import JobSize
    from hpcddp.planning.site import choices

    usual, each = choices.usual_size(facts) if facts else (1, 1)
    device = "" if each or not facts else "cpu"
    if nodes is None:
        nodes = str(usual)
        nodes = click.prompt("nodes", default=nodes) if ask else nodes
    if gpus is None:
        gpus = str(each or 1)
        what = "processes per node" if device else "GPUs per node"
        gpus = click.prompt(what, default=gpus) if ask else gpus
    number = parse_count(gpus, "GPUs per node", where="--gpus")
    return JobSize(parse_nodes(nodes, where="--nodes"), number, kind, device)


def _check(job: NewJob, force: bool) -> None:
    """Refuse to replace a job file that differs, and show the difference."""
    different = job.differences()
    if different and not force:
        click.echo("\n".join(different))
        hint = "`--force` replaces it"
        raise UserError("the file exists, and differs", where=str(job.path), hint=hint)
    if job.foreign_schema and not force:
        hint = "rename it, or replace it with `--force`"
        raise UserError("the file is not of hpcddp", where=str(job.schema), hint=hint)


def _write(job: NewJob) -> None:
    """Write the job file, and show it."""
    job.save()
    click.echo(f"job       {job.path}")
    _show(job.text)


def _show(text: str) -> None:
    click.echo()
    for line in text.splitlines():
        click.echo(f"  {line}".rstrip())
    click.echo()
