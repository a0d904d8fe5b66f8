"""``hpcddp ranks``: print the map of ranks, nodes and hosts, row by row."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import repeat
from typing import TYPE_CHECKING

import click

from hpcddp.sizes import parse_gpus, parse_nodes
from hpcddp.slurm.hostlist import expand_hosts
from hpcddp.topology import Topology, map_rows

if TYPE_CHECKING:
    from hpcddp.strategy import Layout

SCHEMA_VERSION = 1


@click.command()
@click.option("--nodes", "-N", default="1", help="Number of nodes, or a range such as 1-4.")
@click.option("--gpus", default="1", help="GPUs per node.")
@click.option("--strategy", metavar="S", help="Show places in its mesh too: fsdp, pp=2,ddp=4.")
@click.option("--hosts", metavar="HOSTLIST", help="Names of the nodes, such as n[1-3],gpu07.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def ranks(nodes: str, gpus: str, strategy: str | None, hosts: str | None, as_json: bool) -> None:
    """Show which global rank runs where: node, host and local rank.

    Of a range of nodes the map of the largest number is shown.
    """
    asked = parse_nodes(nodes, where="--nodes")
    devices, mesh = parse_gpus(gpus, where="--gpus"), None
    here = devices
    if strategy is not None:
        from hpcddp import strategy as strategies  # to print a plain map takes no time

        mesh = strategies.layout(strategy, asked.max, devices, "--strategy")
        here = strategies.processes(strategy, devices)
    topology = Topology(asked.max, here)
    names = None if hosts is None else expand_hosts(hosts)
    lines = table(topology, names, mesh)
    if as_json:
        lines = _json_lines(topology, names, mesh, devices)
    if asked.min != asked.max:
        click.echo(f"{asked} nodes: this is the map of {asked.max}", err=True)
    sys.stdout.writelines(lines)


def table(
    topology: Topology, hosts: list[str] | None = None, mesh: Layout | None = None
) -> Iterator[str]:
    """The map as aligned lines, the header first, with columns for the ranks' places in a mesh."""
    rank_width = max(len("rank"), len(str(topology.world_size - 1)))
    node_width = max(len("node"), len(str(topology.nodes - 1)))
    host_width = max(map(len, ["host", *(hosts or [])]))
    rows = map_rows(topology, hosts)  # checks the hosts before the first line is out
    names, places = _places(mesh)
    columns = "".join(f"  {{:>{max(len(name), rank_width)}}}" for name in names)
    line = f"{{:>{rank_width}}}  {{:>{node_width}}}  {{:<{host_width}}}  {{:>10}}{columns}\n".format
    yield line("rank", "node", "host", "local rank", *names)
    for (rank, node, host, local), place in zip(rows, places, strict=False):
        yield line(rank, node, host or "-", local, *place)


def _places(mesh: Layout | None) -> tuple[list[str], Iterator[tuple[int, ...]]]:
    """The columns of a mesh, and each rank's numbers there."""
    names, places = mesh.columns() if mesh else ([], iter(()))
    return names, places if names else repeat(())


def _json_lines(
    topology: Topology, hosts: list[str] | None, mesh: Layout | None, gpus: int
) -> Iterator[str]:
    """One object over many lines, a rank a line, so that nothing waits for the last rank."""
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
