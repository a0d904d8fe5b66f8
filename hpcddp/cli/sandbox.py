"""Command line: a whole real Slurm on this machine, up and down."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from hpcddp.sandbox.cluster import Sandbox, Settings, default_folder
from hpcddp.sandbox.config import MAX_NODES, PREEMPT_MODES


def _folder(command: Callable[..., None]) -> Callable[..., None]:
    return click.option(
        "--folder",
        type=click.Path(file_okay=False, path_type=Path),
        default=default_folder,
        help="Where it lives.  [default: $HPCDDP_SANDBOX, else below ~/.local/state]",
    )(command)


def _pairs(
    context: click.Context, option: click.Parameter, values: tuple[str, ...]
) -> dict[str, str]:
    for value in values:
        if not value.partition("=")[2]:
            raise click.BadParameter(f"{value!r} is not KEY=VALUE", context, option)
    return dict(value.split("=", 1) for value in values)


@click.group()
def sandbox() -> None:
    """A whole real Slurm on this machine."""


@sandbox.command()
@click.option("--nodes", type=click.IntRange(1, MAX_NODES), default=4, show_default=True)
@click.option("--gpus", type=click.IntRange(0), default=4, show_default=True, help="Per node.")
@click.option("--cpus", type=click.IntRange(0), default=0, help="Per node.  [default: one per GPU]")
@click.option("--accounting/--no-accounting", default=True, show_default=True)
@click.option(
    "--preempt-mode",
    type=click.Choice(PREEMPT_MODES, case_sensitive=False),
    default="REQUEUE",
    show_default=True,
    help="What happens to a job in partition low when one in high wants its nodes.",
)
@click.option("--grace", type=click.IntRange(0), default=5, show_default=True, help="Seconds.")
@click.option("--kill-wait", type=click.IntRange(0), default=5, show_default=True, help="Seconds.")
@click.option("--set", "extra", multiple=True, callback=_pairs, metavar="K=V", help="slurm.conf.")
@_folder
def up(folder: Path, **given: Any) -> None:
    """Start it; returns when all nodes are idle."""
    box = Sandbox(folder)
    started = box.up(Settings(**given))
    click.echo("up" if started else "it was up already, with its own settings:", err=True)
    click.echo(_describe(box.status()))
    click.echo('eval "$(hpcddp sandbox env)" puts this shell on it', err=True)


@sandbox.command()
@_folder
def down(folder: Path) -> None:
    """End it, its jobs included; nothing stays behind."""
    ended = Sandbox(folder).down()
    click.echo("down" if ended else "there was none", err=True)


@sandbox.command()
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@_folder
def status(folder: Path, as_json: bool) -> None:
    """Its state, nodes and daemons."""
    facts = Sandbox(folder).status()
    click.echo(json.dumps(facts) if as_json else _describe(facts))


@sandbox.command()
@_folder
def env(folder: Path) -> None:
    """Shell lines that put a shell on it: eval "$(hpcddp sandbox env)"."""
    for name, value in Sandbox(folder).environ().items():
        click.echo(f"export {name}={shlex.quote(value)}")


def _describe(facts: dict[str, Any]) -> str:
    lines = [f"{facts['state']}  {facts['folder']}"]
    if facts["state"] == "down":
        return lines[0]
    if facts["home"] != facts["folder"]:
        lines.append(f"daemons live in {facts['home']}: the folder's path is too long for sockets")
    if not facts["own_hostnames"]:
        lines.append("host names of their own are forbidden here: all nodes have this machine's,")
        lines.append("and the daemons listen on all its addresses")
    if (first := next(iter(facts["nodes"]))) != "n1":
        lines.append(f"node names start at {first}: n1 was taken")
    gpus = facts["gpus_per_node"]
    lines += [f"  {name}  {gpus} GPUs  {state}" for name, state in facts["nodes"].items()]
    dead = [name for name, daemon in facts["daemons"].items() if not daemon["alive"]]
    if dead:
        lines.append(f"not running: {', '.join(dead)}")
    return "\n".join(lines)
