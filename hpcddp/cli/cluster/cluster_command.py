"""`hpcddp cluster`: profiles of Slurm clusters."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

import click

from hpcddp.cli.cluster import cluster_tables, detection_notes
from hpcddp.cli.terminal import say, tables
from hpcddp.errors import ClusterError

SCHEMA_VERSION = 1


@click.group()
def cluster() -> None:
    """Describe the Slurm cluster of this shell, for all later commands.

    A profile holds the values of a cluster: partition, account, how GPUs are requested. `--cluster
    auto`, the default, takes the profile that has the name of the cluster.
    """


@cluster.command()
@click.argument("name", required=False)
@click.option("--clusters", "-M", metavar="NAME",
              help="A cluster other than your shell's, as for sbatch.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace your changes to the profile.")
@click.option("--no-trials", is_flag=True, help="Do not run sbatch --test-only.")
@click.option("--dry-run", is_flag=True, help="Print the profile; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def detect(
    name: str | None, clusters: str | None, force: bool, no_trials: bool, dry_run: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Read the cluster from Slurm, and write its profile.

    NAME is the name of the profile. [default: that of the cluster at Slurm]

    It calls Slurm's programs at most eight times, and `sbatch --test-only` at most four times. It
    submits nothing. `hpcddp doctor` reads what only the nodes can tell, such as the GPU driver.
    """
    from hpcddp.planning.site import choices, detected

    site = detected.detect(
        name or "", os.environ, force=force, tries=not no_trials, other=clusters or ""
    )
    detection_notes.show(site)
    if not dry_run:
        site.save()
    if as_json:
        click.echo(json.dumps(_plain(site.facts) | {"profile": str(site.path)}))
        return
    if dry_run:
        click.echo(site.profile.text, nl=False)
        return
    for line in cluster_tables.summary(site.facts):
        click.echo(line)
    click.echo(f"\n{'wrote' if site.changed else 'unchanged':9} {site.path}")
    nodes, gpus = choices.usual_size(site.facts)
    size = f"--gpus {gpus}" if gpus else "--procs 1"
    size += f" --cluster {site.path.stem}" if clusters else ""
    click.echo(f"next      hpcddp submit --nodes {nodes} {size} -- python train.py")


@cluster.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_(as_json: bool) -> None:
    """List the profiles."""
    from hpcddp.planning import clusters

    rows = clusters.known(os.environ)
    if as_json:
        profiles = [{"name": name, "path": str(path)} for name, path in rows.items()]
        click.echo(json.dumps({"schema_version": SCHEMA_VERSION, "profiles": profiles}))
        return
    texts = [(name, _description(path), str(path)) for name, path in rows.items()]
    for line in tables.table([("NAME", "DESCRIPTION", "FILE"), *texts]):
        click.echo(line)


def _description(path: Path) -> str:
    """The description in a profile, or why it cannot be used."""
    from hpcddp.planning import clusters

    try:
        return clusters.read(path).cluster.description
    except ClusterError as error:
        return f"invalid: {error.what}"


@cluster.command()
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(name: str | None, as_json: bool) -> None:
    """Show a profile and the facts that it rests on.

    NAME is a profile's name or path. [default: the profile that --cluster auto takes]
    """
    from hpcddp.planning import clusters
    from hpcddp.planning.asked import resolve
    from hpcddp.planning.site import site_facts

    profile = clusters.load(name or resolve("auto", os.environ)[0], os.environ)
    facts = site_facts.load(profile.path)
    if as_json:
        values = dataclasses.asdict(profile.cluster)
        click.echo(json.dumps({
            "schema_version": SCHEMA_VERSION, "name": profile.name, "path": str(profile.path),
            "values": values, "facts": _plain(facts) if facts else None,
        }))  # fmt: skip
        return
    for line in cluster_tables.profile(profile):
        click.echo(line)
    if facts is None:
        say.note("Slurm's facts are not recorded; `hpcddp cluster detect` reads them")
        return
    click.echo()
    for line in cluster_tables.summary(facts):
        click.echo(line)


@cluster.command()
@click.argument("profile", metavar="PROFILE")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check(profile: str, as_json: bool) -> int:
    """Check a profile and its template: render a script, and ask bash and sbatch about it.

    PROFILE is a profile's name or path. The script is that of one process; nothing is submitted.

    The exit code is 1 if sbatch refuses the script.
    """
    from hpcddp.planning.site import profile_check

    outcome = profile_check.check(profile, os.environ, Path.cwd())
    plan, accepted = outcome.plan, outcome.accepted
    for note in plan.notes:
        say.note(note)
    if as_json:
        facts: dict[str, Any] = {"path": str(plan.profile.path)}
        facts["template"] = str(plan.template)
        facts |= {"accepted": accepted, "message": outcome.answer, "script": outcome.script}
        facts["advice"] = outcome.advice
        click.echo(json.dumps({"schema_version": SCHEMA_VERSION, **facts}))
        return 1 if accepted is False else 0
    verdict = "refused" if accepted is False else "accepted" if accepted else "not asked"
    answer = f"{verdict}: {outcome.answer}".removesuffix(": ")
    rows = [("profile", str(plan.profile.path)), ("template", str(plan.template))]
    options = re.findall(r"^#SBATCH (--.+)$", outcome.script, re.MULTILINE)
    rows += [("request", " ".join(options))] if options else []
    rows += [("bash -n", "valid"), ("sbatch", answer)]
    rows += [("change", outcome.advice)] if outcome.advice else []
    for line in tables.fields(rows, whole=["profile", "template", "request"]):
        click.echo(line)
    return 1 if accepted is False else 0


def _plain(facts: Any) -> dict[str, Any]:
    """The facts as plain data."""
    return dict(dataclasses.asdict(facts))
