"""Strategies, the division of a model over the ranks: a text such as ``pp=2,ddp=4`` <-> a Layout.

The ranks form one mesh. Its dimensions, the outermost first:

    pp      stages of a pipeline: each has some of the model's parts
    ddp     replicas, which average their gradients
    fsdp    ranks that divide each parameter, its gradient and its optimizer state
    tp      ranks that compute each layer together; neighbours, since they communicate most

Samples are divided over ddp x fsdp. Ranks that differ only in pp or tp have the same samples.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from itertools import product
from typing import NamedTuple

from hpcddp.errors import UserError
from hpcddp.keys import nearest
from hpcddp.sizes import counted

FACTORS = ("pp", "ddp", "fsdp", "tp")


class Strategy(NamedTuple):
    """A row of the table.

    Args:
        what: a description of one line.
        factor: the dimension of the mesh that its size sets; "" for one process, which cannot be
            combined with others.
        devices: the most devices that it can use; 0 for any number.
        threads: one process uses all GPUs of its node, with threads.
        zero: the ddp ranks divide the optimizer state.
        grouped: its ranks form groups, a node each by default, with ddp between the groups.
        clashes: strategies that conflict with it, and why.
    """

    what: str
    factor: str = ""
    devices: int = 0
    threads: bool = False
    zero: bool = False
    grouped: bool = False
    clashes: Mapping[str, str] = {}


_DIVIDED = "fsdp already divides the optimizer state"
_GROUPS = "hsdp is fsdp in groups, with ddp between them"
STRATEGIES = {
    "single": Strategy("one process on one device", devices=1),
    "dp": Strategy("one process with all GPUs of one node (nn.DataParallel)", threads=True),
    "ddp": Strategy("a replica of the model on each rank; gradients are averaged", "ddp"),
    "zero1": Strategy(
        "as ddp, with divided optimizer state (ZeroRedundancyOptimizer)", "ddp", zero=True,
        clashes={
            "ddp": "zero1 is ddp with divided optimizer state",
            "fsdp": _DIVIDED,
            "hsdp": _DIVIDED,
            "tp": "use fsdp with tp",
        },
    ),
    "fsdp": Strategy("divided parameters, gradients and optimizer state (fully_shard)", "fsdp"),
    "hsdp": Strategy(
        "fsdp in groups of ranks, a node by default, and ddp between the groups", "fsdp",
        grouped=True, clashes={"fsdp": _GROUPS, "ddp": _GROUPS},
    ),
    "tp": Strategy("layers computed by several ranks together (parallelize_module)", "tp"),
    "pp": Strategy(
        "the model's parts in the stages of a pipeline (torch.distributed.pipelining)", "pp"
    ),
}  # fmt: skip
ALONE = tuple(name for name, row in STRATEGIES.items() if not row.factor)


class MeshPosition(NamedTuple):
    """A rank's place in the mesh."""

    pp: int
    ddp: int
    fsdp: int
    tp: int


class Layout(NamedTuple):
    """The sizes of the mesh, and two more facts.

    Args:
        zero: the ddp ranks divide the optimizer state.
        threads: one process uses all GPUs of its node, with threads.
    """

    pp: int = 1
    ddp: int = 1
    fsdp: int = 1
    tp: int = 1
    zero: bool = False
    threads: bool = False

    def __str__(self) -> str:
        if self.threads:
            return "dp"
        sizes = zip(FACTORS, self[:4], strict=True)
        text = ",".join(f"{name}={size}" for name, size in sizes if size > 1) or "single"
        return text.replace("ddp", "zero1") if self.zero else text

    @property
    def world_size(self) -> int:
        return math.prod(self[:4])

    @property
    def data_size(self) -> int:
        """Number of ranks that divide a batch."""
        return self.ddp * self.fsdp

    @property
    def plain(self) -> bool:
        """Whether each rank has the whole model."""
        return self.pp == self.fsdp == self.tp == 1

    def place(self, rank: int) -> MeshPosition:
        """The position of a global rank."""
        rank, tp = divmod(rank, self.tp)
        rank, fsdp = divmod(rank, self.fsdp)
        pp, ddp = divmod(rank, self.ddp)
        return MeshPosition(pp, ddp, fsdp, tp)

    def rank(self, place: MeshPosition) -> int:
        """The global rank of a position."""
        return ((place.pp * self.ddp + place.ddp) * self.fsdp + place.fsdp) * self.tp + place.tp

    def data_rank(self, rank: int) -> int:
        """The share of a batch of a global rank."""
        place = self.place(rank)
        return place.ddp * self.fsdp + place.fsdp

    def columns(self) -> tuple[list[str], Iterator[tuple[int, ...]]]:
        """Columns of a table of the ranks: names, and the position of each rank. None if each rank
        has the whole model, since its rank then says all."""
        if self.plain:
            return [], iter(())
        shown = [i for i, size in enumerate(self[:4]) if size > 1]
        rows = (
            (*(place[i] for i in shown), place[1] * self.fsdp + place[2])
            for place in product(*map(range, self[:4]))
        )
        return [*(FACTORS[i] for i in shown), "data"], rows

    def stream(self, rank: int) -> int:
        """The random stream of a global rank: the ranks of a tp group share one."""
        return rank // self.tp


def parse(text: str, where: str = "strategy") -> dict[str, int | None]:
    """Names and sizes as written; None for an omitted size.

    Raises:
        UserError: a name is unknown or repeated, a size is invalid, or two sizes are omitted.
    """
    sizes: dict[str, int | None] = {}
    for part in text.replace(" ", "").split(","):
        name, equals, size = part.partition("=")
        if name not in STRATEGIES:
            raise UserError(f"unknown strategy {name!r}", where=where,
                            hint=nearest(name, STRATEGIES, what="strategy"))  # fmt: skip
        if name in sizes:
            raise UserError(f"{text!r} has {name} twice", where=where, hint=_HINT)
        if equals and not (_SIZE.fullmatch(size) and int(size)):
            raise UserError(f"invalid size in {f'{name}={size}'!r:.60}", where=where, hint=_HINT)
        sizes[name] = int(size) if equals else None
    _check_product(text, sizes, where)
    return sizes


def _check_product(text: str, sizes: Mapping[str, int | None], where: str) -> None:
    """Refuse strategies that conflict, and more than one omitted size."""
    for name in ALONE:
        if name in sizes and len(sizes) > 1:
            raise UserError(f"{name} cannot be combined with others, got {text!r}", where=where,
                            hint=f"use {name} alone, or remove it")  # fmt: skip
        if (most := STRATEGIES[name].devices) and sizes.get(name) not in (None, most):
            raise UserError(f"{name} uses one process, got {text!r}", where=where,
                            hint=f"write {name}, or use ddp")  # fmt: skip
    open_ = [name for name, size in sizes.items() if size is None and not STRATEGIES[name].grouped]
    if len(open_) > 1:
        raise UserError(f"{text!r} omits more than one size", where=where, hint=_HINT)
    for first, row in STRATEGIES.items():
        for second, why in row.clashes.items() if first in sizes else ():
            if second in sizes:
                raise UserError(f"{first} conflicts with {second}: {why}", where=where,
                                hint=f"remove {first} or {second}")  # fmt: skip


def rows(text: str) -> list[Strategy]:
    """The rows of the table that a strategy consists of."""
    return [STRATEGIES[name] for name in parse(text)]


_SIZE = re.compile(r"[0-9]{1,9}")
_HINT = "write names and sizes, such as fsdp=4,tp=2; one size may be omitted"


def layout(text: str, nodes: int, gpus: int, where: str = "strategy") -> Layout:
    """The mesh of a strategy on a number of nodes and GPUs per node.

    Raises:
        UserError: the product of the sizes is not the number of ranks, or the strategy cannot use
            so many nodes.
    """
    asked, world = parse(text, where), nodes * gpus
    name = next(iter(asked))
    if not STRATEGIES[name].factor:
        return _alone(name, asked[name], nodes, gpus, where)
    sizes = _sizes(asked, nodes, gpus, where)
    product = math.prod(size for size in sizes.values() if size)
    open_ = [name for name, size in sizes.items() if size is None]
    if world % product or (not open_ and product != world):
        factors = " x ".join(f"{name}={size}" for name, size in sizes.items() if size)
        raise UserError(
            f"{factors} = {product}, but there are {_ranks(nodes, gpus)}",
            where=where,
            hint="the product of the sizes must be the number of ranks; one size may be omitted",
        )
    for name in open_:
        sizes[name] = world // product
    mesh = {STRATEGIES[name].factor: size or 1 for name, size in sizes.items()}
    pp, ddp, fsdp, tp = (mesh.get(factor, 1) for factor in FACTORS)
    zero = ddp > 1 and any(STRATEGIES[name].zero for name in sizes)
    return Layout(pp, ddp, fsdp, tp, zero=zero)


def _alone(name: str, size: int | None, nodes: int, gpus: int, where: str) -> Layout:
    """The mesh of a strategy with one process."""
    ranks = _ranks(nodes, gpus)
    if STRATEGIES[name].threads:
        if nodes > 1 or size not in (None, gpus):
            raise UserError(
                f"{name} uses one process on one node with all its GPUs, got {ranks}",
                where=where,
                hint="use ddp, which is faster and works on several nodes",
            )
        return Layout(threads=True)
    if nodes * gpus > STRATEGIES[name].devices:
        raise UserError(f"{name} uses one process, but there are {ranks}", where=where,
                        hint="use --nodes 1 --gpus 1, or the strategy ddp")  # fmt: skip
    return Layout()


def _ranks(nodes: int, gpus: int) -> str:
    return f"{nodes} x {gpus} = {counted(nodes * gpus, 'rank')}"


def _sizes(
    asked: dict[str, int | None], nodes: int, gpus: int, where: str
) -> dict[str, int | None]:
    """The sizes as written, with those of a group of ranks as fsdp and ddp."""
    sizes = dict(asked)
    grouped = next((name for name in sizes if STRATEGIES[name].grouped), None)
    if grouped is None:
        return sizes
    group = sizes.pop(grouped)
    if group is None:
        group = gpus // (sizes.get("tp") or 1)
        if nodes == 1 or group < 2:
            raise UserError(
                f"{grouped} without a size divides the model within each of several nodes, but "
                + ("there is one node" if nodes == 1 else "each node has one rank for it"),
                where=where,
                hint=f"write a group size, such as {grouped}=2, or use fsdp or ddp",
            )
    if any(size is None for size in sizes.values()):
        raise UserError(f"all other sizes are required with {grouped}", where=where,
                        hint="write the other sizes; the rest of the ranks is ddp")  # fmt: skip
    return {**sizes, "ddp": None, STRATEGIES[grouped].factor: group}


def is_single(text: str) -> bool:
    """Whether a strategy is one process on one device, the reference of all others."""
    return any(row.devices == 1 for row in rows(text))


def processes(text: str, gpus: int) -> int:
    """Ranks per node: one if threads use its GPUs."""
    return 1 if any(row.threads for row in rows(text)) else gpus
