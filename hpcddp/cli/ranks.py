"""``hpcddp ranks``: print the map of ranks, nodes and hosts, row by row."""

import json
import sys
from collections.abc import Iterator

import click

from hpcddp.hostlist import expand_hosts
from hpcddp.topology import Topology, map_rows, parse_gpus, parse_nodes

SCHEMA_VERSION = 1


@click.command()
@click.option("--nodes", "-N", default="1", help="Number of nodes, or a range such as 1-4.")
@click.option("--gpus", default="1", help="GPUs per node.")
@click.option("--hosts", metavar="HOSTLIST", help="Names of the nodes, such as n[1-3],gpu07.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def ranks(nodes: str, gpus: str, hosts: str | None, as_json: bool) -> None:
    """Show which global rank runs where: node, host and local rank.

    Of a range of nodes the map of the largest number is shown.
    """
    asked = parse_nodes(nodes, where="--nodes")
    topology = Topology(asked.max, parse_gpus(gpus, where="--gpus"))
    names = None if hosts is None else expand_hosts(hosts)
    lines = (_json_lines if as_json else table)(topology, names)
    if asked.min != asked.max:
        click.echo(f"{asked} nodes: this is the map of {asked.max}", err=True)
    sys.stdout.writelines(lines)


def table(topology: Topology, hosts: list[str] | None = None) -> Iterator[str]:
    """The map as aligned lines, the header first."""
    rank_width = max(len("rank"), len(str(topology.world_size - 1)))
    node_width = max(len("node"), len(str(topology.nodes - 1)))
    host_width = max(map(len, ["host", *(hosts or [])]))
    rows = map_rows(topology, hosts)  # checks the hosts before the first line is out
    line = f"{{:>{rank_width}}}  {{:>{node_width}}}  {{:<{host_width}}}  {{:>10}}\n".format
    yield line("rank", "node", "host", "local rank")
    for rank, node, host, local in rows:
        yield line(rank, node, host or "-", local)


def _json_lines(topology: Topology, hosts: list[str] | None) -> Iterator[str]:
    """One object over many lines, a rank a line, so that nothing waits for the last rank."""
    quoted = None if hosts is None else [json.dumps(host) for host in hosts]
    rows = map_rows(topology, quoted)
    head = {
        "schema_version": SCHEMA_VERSION,
        "nodes": topology.nodes,
        "gpus_per_node": topology.gpus_per_node,
        "world_size": topology.world_size,
    }
    yield json.dumps(head).removesuffix("}") + ', "ranks": ['
    before = "\n"
    for rank, node, host, local in rows:
        yield (
            f'{before}{{"rank": {rank}, "node": {node}, "host": {host or "null"},'
            f' "local_rank": {local}}}'
        )
        before = ",\n"
    yield "\n]}\n"
