"""``hpcddp ranks``: print the map of ranks, nodes and hosts, row by row."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import repeat
from typing import TYPE_CHECKING, Any

import click

from hpcddp.cli import completion
from hpcddp.cli.terminal import say
from hpcddp.cli.terminal.tables import columns
from hpcddp.sizes import parse_gpus, parse_nodes
from hpcddp.slurm.hostlist import expand_hosts
from hpcddp.topology import Topology, map_rows

if TYPE_CHECKING:
    from hpcddp.strategy import Layout

SCHEMA_VERSION = 1


@click.command()
@click.option("--nodes", "-N", metavar="N", default="1", show_default=True,
              help="Number of nodes, or a range such as 1-4.")  # fmt: skip
@click.option("--gpus", metavar="N", default="1", show_default=True, help="GPUs per node.")
@click.option("--strategy", metavar="STRATEGY", shell_complete=completion.strategies,
              help="Strategy whose mesh is shown too, such as fsdp or pp=2,ddp=4.")  # fmt: skip
@click.option("--hosts", metavar="HOSTS", help="Names of the nodes, such as n[1-3],gpu07.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def ranks(nodes: str, gpus: str, strategy: str | None, hosts: str | None, as_json: bool) -> None:
    """Print the node, host and local rank of each global rank.

    For a range of nodes it prints the map of the largest number.
    """
    asked = parse_nodes(nodes, where="--nodes")
    devices, mesh = parse_gpus(gpus, where="--gpus"), None
    here = devices
    if strategy is not None:
        from hpcddp import strategy as strategies  # a plain map does without

        mesh = strategies.layout(strategy, asked.max, devices, "--strategy")
        here = strategies.processes(strategy, devices)
    topology = Topology(asked.max, here)
    names = None if hosts is None else expand_hosts(hosts)
    lines = table(topology, names, mesh)
    if as_json:
        lines = _json_lines(topology, names, mesh, devices)
    if asked.min != asked.max:
        say.note(f"this is the map of {asked.max} nodes (of {asked})")
    sys.stdout.writelines(lines)


def table(
    topology: Topology, hosts: list[str] | None = None, mesh: Layout | None = None
) -> Iterator[str]:
    """The map as aligned lines, with columns for the positions of the ranks in a mesh."""
    rank_width = max(len("rank"), len(str(topology.world_size - 1)))
    node_width = max(len("node"), len(str(topology.nodes - 1)))
    host_width = max(map(len, ["host", *(hosts or [])]))
    rows = map_rows(topology, hosts)  # checks the hosts before the first line is printed
    names, places = _places(mesh)
    heads, gap = ["rank", "node", "host", "local rank", *names], "  "
    widths = [rank_width, node_width, host_width, len(heads[3])]
    widths += [max(len(name), rank_width) for name in names]
    if sum(widths) + len(gap) * len(names) + 6 > columns():
        heads[3], gap = "local", " "
        widths[3] = len(heads[3])
    cells = zip(">><>" + ">" * len(names), widths, strict=True)
    line = (gap.join(f"{{:{side}{width}}}" for side, width in cells) + "\n").format
    yield line(*heads)
    for (rank, node, host, local), place in zip(rows, places, strict=False):
        yield line(rank, node, host or "-", local, *place)


def _places(mesh: Layout | None) -> tuple[list[str], Iterator[tuple[int, ...]]]:
    """The columns of a mesh, and the numbers of each rank in them."""
    names, places = mesh.columns() if mesh else ([], iter(()))
    return names, places if names else repeat(())


def facts(topology: Topology, *, mesh: Layout | None, gpus: int) -> dict[str, Any]:
    """The map without hosts as plain data.

    Args:
        gpus: of one node.
    """
    data: dict[str, Any] = json.loads("".join(_json_lines(topology, None, mesh, gpus)))
    return data


def _json_lines(
    topology: Topology, hosts: list[str] | None, mesh: Layout | None, gpus: int
) -> Iterator[str]:
    """One object with a line for each rank, so that it is printed while it is computed."""
    quoted = None if hosts is None else [json.dumps(host) for host in hosts]
    rows = map_rows(topology, quoted)
    head = {
        "schema_version": SCHEMA_VERSION,
        "nodes": topology.nodes,
        "gpus_per_node": gpus,
        "world_size": topology.world_size,
        **({"strategy": str(mesh)} if mesh else {}),
    }
    names, places = _places(mesh)
    columns = "".join(f', "{name}": %d' for name in names)
    yield json.dumps(head).removesuffix("}") + ', "ranks": ['
    before = "\n"
    for (rank, node, host, local), place in zip(rows, places, strict=False):
        yield (
            f'{before}{{"rank": {rank}, "node": {node}, "host": {host or "null"},'
            f' "local_rank": {local}{columns % place}}}'
        )
        before = ",\n"
    yield "\n]}\n"
