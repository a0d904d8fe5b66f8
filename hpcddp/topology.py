"""The map nodes x GPUs <-> ranks, and all rank arithmetic there is.

``Topology`` is what was planned; ``Rank`` is what one process finds in its environment. Ranks are
laid out in blocks: node 0 holds the first ``gpus_per_node`` ranks, node 1 the next, and so on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from typing import NamedTuple

from hpcddp.errors import RankMapError, TopologyError
from hpcddp.sizes import counted, whole

DIALECTS: dict[str, dict[str, tuple[str, ...]]] = {
    "torchrun": {
        "world_rank": ("RANK",),
        "world_size": ("WORLD_SIZE",),
        "local_rank": ("LOCAL_RANK",),
        "local_size": ("LOCAL_WORLD_SIZE",),
        "node": ("GROUP_RANK",),
    },
    "openmpi": {
        "world_rank": ("OMPI_COMM_WORLD_RANK",),
        "world_size": ("OMPI_COMM_WORLD_SIZE",),
        "local_rank": ("OMPI_COMM_WORLD_LOCAL_RANK",),
        "local_size": ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    },
    "slurm": {
        "world_rank": ("SLURM_PROCID",),
        "world_size": ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        "local_rank": ("SLURM_LOCALID",),
        "tasks_per_node": ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
        "nodes": ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
        "node": ("SLURM_NODEID",),
    },
    "pmi": {
        "world_rank": ("PMI_RANK",),
        "world_size": ("PMI_SIZE",),
        "local_rank": ("MPI_LOCALRANKID",),
        "local_size": ("MPI_LOCALNRANKS",),
    },
    "local": {},
}
"""The variables that each launcher sets. The first dialect whose world_rank is set applies.

Where a meaning has several names, the first that is set counts. torchrun comes first because
inside ``srun torchrun`` SLURM_PROCID is the number of the node. openmpi comes before slurm because
ranks that mpirun starts in a batch script inherit the script's meaningless SLURM_PROCID of 0.
"local" has no variables: a world of one rank.
"""

MappedRank = tuple[int, int, "str | None", int]
"""One rank of a map: global rank, node, host, local rank."""


class _Rank(NamedTuple):
    world_rank: int
    world_size: int
    local_rank: int
    local_size: int
    node: int


class Rank(_Rank):
    """Where one process stands. All numbers count from 0; sizes are numbers of processes."""

    __slots__ = ()

    def __new__(
        cls, world_rank: int, world_size: int, local_rank: int, local_size: int, node: int
    ) -> Rank:
        self = super().__new__(cls, world_rank, world_size, local_rank, local_size, node)
        self._check()
        return self

    def _check(self) -> None:
        if not 1 <= self.local_size <= self.world_size:
            raise TopologyError(
                f"a node cannot have {self.local_size} of {counted(self.world_size, 'rank')}",
                hint="a node has at least one rank, and at most all ranks",
            )
        _check_number("global rank", self.world_rank, self.world_size)
        _check_number("local rank", self.local_rank, self.local_size)
        _check_number("node", self.node, self.world_size)

    def __str__(self) -> str:
        nodes, rest = divmod(self.world_size, self.local_size)
        return (
            f"rank {self.world_rank}({self.world_size}), "
            f"node {self.node}{'' if rest else f'({nodes})'}, "
            f"local {self.local_rank}({self.local_size})"
        )

    @property
    def nodes(self) -> int:
        """Number of nodes, if each has as many ranks as this one."""
        return -(-self.world_size // self.local_size)

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Rank:
        """Read the rank from a process's environment. Nothing else reads it.

        Call it in a process that a launcher started as a rank. Slurm also sets SLURM_PROCID=0 in a
        batch shell, where it has no meaning. A launcher that starts ranks there without srun
        removes SLURM_PROCID from their environment.
        """
        dialect, names = next(
            row for row in DIALECTS.items() if not row[1] or row[1]["world_rank"][0] in environ
        )
        if not names:
            return cls(0, 1, 0, 1, 0)
        number = {
            meaning: _number(dialect, meaning, environ)
            for meaning in ("world_rank", "world_size", "local_rank", "local_size", "node")
            if meaning in names
        }
        if "local_size" not in names:
            number["local_size"] = _slurm_local_size(environ, number["node"], number["world_size"])
        if "node" not in names:
            number["node"] = number["world_rank"] // max(number["local_size"], 1)
        try:
            return cls(**number)
        except TopologyError as error:
            raise _env_error(dialect, error.what) from None

    def to_env(self) -> dict[str, str]:
        """The variables that torchrun sets: the inverse of ``from_env``."""
        meanings = DIALECTS["torchrun"].items()
        return {name: str(getattr(self, meaning)) for meaning, (name,) in meanings}

    def check(self, topology: Topology) -> None:
        """Raise RankMapError unless this is the rank that the plan has in this place."""
        planned = (topology.world_size, topology.gpus_per_node)
        first = self.node * topology.gpus_per_node
        if (self.world_size, self.local_size) != planned:
            wrong = f"expected {counted(planned[0], 'rank')}, {planned[1]} on each node"
        elif self.world_rank != first + self.local_rank:
            wrong = f"expected rank {first + self.local_rank} in this place"
        else:
            return
        raise RankMapError(
            f"{self} does not fit {topology}: {wrong}",
            where=f"rank {self.world_rank}",
            hint="start the ranks in blocks, the same number on each node:"
            f" srun --ntasks-per-node={planned[1]} --distribution=block",
        )


class _Topology(NamedTuple):
    nodes: int
    gpus_per_node: int


class Topology(_Topology):
    """The planned map: nodes times GPUs per node ranks."""

    __slots__ = ()

    def __new__(cls, nodes: int, gpus_per_node: int) -> Topology:
        if any(type(size) is not int or size < 1 for size in (nodes, gpus_per_node)):
            raise TopologyError(
                f"invalid size: {nodes!r:.60} nodes with {gpus_per_node!r:.60} GPUs each",
                hint="both must be whole numbers from 1 on",
            )
        return super().__new__(cls, nodes, gpus_per_node)

    def __str__(self) -> str:
        return f"{counted(self.nodes, 'node')} x {counted(self.gpus_per_node, 'GPU')}"

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node

    def rank(self, node: int, local: int) -> int:
        """The global rank of local rank ``local`` on node ``node``."""
        _check_number("node", node, self.nodes)
        _check_number("local rank", local, self.gpus_per_node)
        return node * self.gpus_per_node + local

    def rank_of(self, world_rank: int) -> Rank:
        """The place of a global rank."""
        _check_number("global rank", world_rank, self.world_size)
        node, local = divmod(world_rank, self.gpus_per_node)
        return Rank(world_rank, self.world_size, local, self.gpus_per_node, node)

    def ranks(self) -> Iterator[Rank]:
        """All ranks in order, made one by one."""
        return map(self.rank_of, range(self.world_size))


def check_map(rank: Rank, nodes: tuple[int, int], gpus_per_node: int) -> None:
    """Raise RankMapError for a rank that is not in the plan. Of a range of nodes Slurm may give
    fewer than the most."""
    here, rest = divmod(rank.world_size, gpus_per_node)
    if rest or not nodes[0] <= here <= nodes[1]:
        here = nodes[1]  # no planned map has this world size: the check names the largest
    rank.check(Topology(here, gpus_per_node))


def map_rows(topology: Topology, hosts: Sequence[str] | None = None) -> Iterator[MappedRank]:
    """The whole map, row by row; ``hosts`` names the nodes in their order.

    Rows are plain tuples without checks, made one by one: the map of the largest machines takes
    milliseconds and no memory.
    """
    if hosts is not None and len(hosts) != topology.nodes:
        raise TopologyError(
            f"{counted(len(hosts), 'host')} for {counted(topology.nodes, 'node')}",
            where="host list",
            hint="name one host for each node, or change the number of nodes",
        )
    gpus = topology.gpus_per_node
    return (
        (node * gpus + local, node, host, local)
        for node, host in enumerate(repeat(None, topology.nodes) if hosts is None else hosts)
        for local in range(gpus)
    )


def _check_number(name: str, number: int, count: int) -> None:
    if whole(number) is None or number >= count:
        raise TopologyError(
            f"{name} must be from 0 to {count - 1}, got {number!r}",
            hint="use a number in this range, or plan more nodes or GPUs",
        )


def _text(dialect: str, meaning: str, environ: Mapping[str, str]) -> str | None:
    return next((environ[name] for name in DIALECTS[dialect][meaning] if name in environ), None)


def _number(dialect: str, meaning: str, environ: Mapping[str, str]) -> int:
    text, names = _text(dialect, meaning, environ), " or ".join(DIALECTS[dialect][meaning])
    number = whole(text)
    if text is None:
        raise _env_error(dialect, f"{names} is not set")
    if number is None:
        raise _env_error(dialect, f"{names} is {text!r:.60}, not a whole number")
    return number


def _slurm_local_size(environ: Mapping[str, str], node: int, world_size: int) -> int:
    """The number of tasks on a node. Slurm lists them by node, such as ``4(x2),3``; without that
    list all nodes have the same number."""
    text = _text("slurm", "tasks_per_node", environ)
    if text is None:
        nodes = _number("slurm", "nodes", environ)
        if nodes < 1 or world_size % nodes:
            raise _env_error(
                "slurm", f"{world_size} tasks do not divide over {counted(nodes, 'node')}"
            )
        return world_size // nodes
    left = node
    for item in text.split(","):
        tasks, _, times = item.removesuffix(")").partition("(x")
        size, count = whole(tasks), whole(times or "1")
        if size is None or count is None:
            break
        if left < count:
            return size
        left -= count
    names = " or ".join(DIALECTS["slurm"]["tasks_per_node"])
    raise _env_error("slurm", f"{names} is {text!r:.60}, without a number for node {node}")


def _env_error(dialect: str, what: str) -> TopologyError:
    first = DIALECTS[dialect]["world_rank"][0]
    return TopologyError(
        what,
        where=f"{dialect} environment",
        hint=f"{first} is set, so hpcddp reads the variables of {dialect}: start the ranks with it,"
        f" or unset {first}",
    )
