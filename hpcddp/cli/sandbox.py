"""`hpcddp sandbox`: a real Slurm on this machine."""

import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from hpcddp.cli.options import F, json_option
from hpcddp.cli.terminal import say
from hpcddp.sandbox import shell
from hpcddp.sandbox.cluster import Sandbox, Settings
from hpcddp.sandbox.config import MAX_NODES, PREEMPT_MODES
from hpcddp.sizes import counted


def _folder(command: Callable[..., None]) -> Callable[..., None]:
    return click.option(
        "--folder", type=click.Path(file_okay=False, path_type=Path), metavar="FOLDER",
        default=shell.default_folder,
        help="Folder of the sandbox.  [default: HPCDDP_SANDBOX, or one in ~/.local/state]",
    )(command)  # fmt: skip


def _number(name: str, low: int, default: int, text: str, **more: Any) -> Callable[[F], F]:
    """An option with a whole number."""
    metavar = more.pop("metavar", "N")
    kind = click.IntRange(low, more.pop("high", None))
    return click.option(
        name, type=kind, metavar=metavar, default=default, show_default=True, help=text, **more
    )


def _pairs(
    context: click.Context, option: click.Parameter, values: tuple[str, ...]
) -> dict[str, str]:
    for value in values:
        if not value.partition("=")[2]:
            raise click.BadParameter(f"expected KEY=VALUE, got {value!r}", context, option)
    return dict(value.split("=", 1) for value in values)


@click.group()
def sandbox() -> None:
    """Run a real Slurm on this machine, for trials and tests.

    The sandbox needs root and Slurm's packages. Its nodes share this machine, and their GPUs exist
    only in Slurm's books: training there uses the CPU.
    """


@sandbox.command()
@_number("--nodes", 1, 4, "Number of nodes.", high=MAX_NODES)
@_number("--gpus", 0, 4, "GPUs per node.")
@click.option("--cpus", type=click.IntRange(0), metavar="N", default=0,
              help="CPUs per node.  [default: one per GPU]")  # fmt: skip
@click.option("--accounting/--no-accounting", default=True, show_default=True,
              help="Slurm's database of ended jobs, for sacct.")  # fmt: skip
@click.option(
    "--preempt-mode", type=click.Choice(PREEMPT_MODES, case_sensitive=False), default="REQUEUE",
    show_default=True, metavar="MODE",
    help="Effect of a job in partition high on jobs in partition low: REQUEUE, CANCEL or OFF.",
)  # fmt: skip
@_number("--grace", 0, 5, "Time between the notice of a preemption and SIGTERM.", metavar="SECONDS")
@_number("--kill-wait", 0, 5, "Time between SIGTERM and SIGKILL.", metavar="SECONDS")
@click.option("--set", "extra", multiple=True, callback=_pairs, metavar="KEY=VALUE",
              help="Line of slurm.conf.")  # fmt: skip
@_folder
def up(folder: Path, **given: Any) -> None:
    """Start the sandbox, and wait until all nodes are idle."""
    box = Sandbox(folder)
    started = box.up(Settings(**given))
    if not started:
        again = shell.command(box.folder, "down")
        click.echo("the sandbox is already up, and keeps its settings", err=True)
        click.echo(f"  to change them, run `{again}` first", err=True)
    facts = box.status()
    click.echo(_describe(facts))
    if os.environ.get("SLURM_CONF") != facts["environ"]["SLURM_CONF"]:
        click.echo("to use it, run this in each shell:", err=True)
        click.echo(f"  {shell.entering(box.folder)}", err=True)


@sandbox.command()
@_folder
def down(folder: Path) -> None:
    """End the sandbox and its jobs, and remove its folder."""
    box = Sandbox(folder)
    from hpcddp.planning.trust import node_book

    line = shell.leaving(os.environ, box.folder)
    ended = box.down()
    node_book.NodeBook.named(node_book.SANDBOX, os.environ).remove()
    text = "the sandbox is down" if ended else f"no sandbox to end in {box.folder}"
    click.echo(text, err=True)
    if line:
        click.echo("this shell still points to it; run", err=True)
        click.echo(f"  {line}", err=True)


@sandbox.command()
@json_option
@_folder
def status(folder: Path, as_json: bool) -> None:
    """Show the state of the sandbox, its nodes and its daemons."""
    facts = Sandbox(folder).status()
    click.echo(json.dumps(facts) if as_json else _describe(facts))


@sandbox.command()
@_folder
def env(folder: Path) -> None:
    """Print the shell lines that make a shell use the sandbox.

    Run them with: eval "$(hpcddp sandbox env)"
    """
    for name, value in Sandbox(folder).environ().items():
        click.echo(f"export {name}={shlex.quote(value)}")


COLOURS = {"up": "green", "down": "yellow", "broken": "red"}  # of the sandbox's states


def _describe(facts: dict[str, Any]) -> str:
    folder = Path(facts["folder"])
    start, end = (f"`{shell.command(folder, verb)}`" for verb in ("up", "down"))
    lines = [f"{say.paint(facts['state'], COLOURS.get(facts['state'], ''))}  {folder}"]
    if facts["state"] == "down":
        return "\n".join([*lines, f"  {start} starts it"])
    gpus = counted(facts["gpus_per_node"], "GPU")
    lines += [f"  {name}  {gpus}  {state}" for name, state in facts["nodes"].items()]
    dead = [name for name, daemon in facts["daemons"].items() if not daemon["alive"]]
    if facts["state"] == "broken":
        lines.append(f"its daemons have ended: {start} starts it again, {end} removes it")
    elif dead:
        lines.append(f"not running: {', '.join(dead)}")
    return "\n".join([*lines, *_remarks(facts)])


def _remarks(facts: dict[str, Any]) -> list[str]:
    """The points in which this sandbox differs from the usual one."""
    remarks = []
    if facts["home"] != facts["folder"]:
        remarks.append(f"the daemons use {facts['home']}: the folder's path is too long for them")
    if not facts["own_hostnames"]:
        remarks.append("this container allows no other host names: all nodes have the machine's,")
        remarks.append("and the daemons listen on all of its addresses")
    if (first := next(iter(facts["nodes"]))) != "n1":
        remarks.append(f"the node names start at {first}: another sandbox or machine is named n1")
    return remarks
