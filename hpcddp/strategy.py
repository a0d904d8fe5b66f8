"""How a model is spread over the ranks: a text such as ``pp=2,ddp=4`` <-> a Layout.

The ranks form one mesh. Its dimensions, the outermost first:

    pp      stages of a pipeline: each holds some of the model's parts
    ddp     replicas, which average their gradients
    fsdp    ranks that divide each parameter, its gradient and its optimizer state
    tp      ranks that compute one layer together; neighbours, since they talk most

Samples are divided over ddp x fsdp. Ranks that differ in pp or tp alone work on the same samples.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from itertools import product
from typing import NamedTuple

from hpcddp.errors import UserError
from hpcddp.keys import nearest

FACTORS = ("pp", "ddp", "fsdp", "tp")


class Strategy(NamedTuple):
    """A row of the table: what differs between strategies.

    Args:
        factor: the dimension of the mesh that its size is; "" for one process, which multiplies
            with nothing.
        devices: how many devices it can use at most; 0 for any number.
        threads: one process drives all GPUs of its node, with threads.
        zero: the optimizer state of the ddp ranks is divided among them.
        grouped: its ranks are a group, a node's by default, and what is left is ddp.
        clashes: other strategies that it does not go with, and why.
    """

    what: str
    factor: str = ""
    devices: int = 0
    threads: bool = False
    zero: bool = False
    grouped: bool = False
    clashes: Mapping[str, str] = {}


_DIVIDED = "fsdp divides the optimizer state already"
_GROUPS = "hsdp is fsdp in groups; the rest is ddp"
STRATEGIES = {
    "single": Strategy("one process on one device", devices=1),
    "dp": Strategy("nn.DataParallel: one process, all GPUs of one node", threads=True),
    "ddp": Strategy("a replica on each rank, gradients averaged", "ddp"),
    "zero1": Strategy(
        "ddp whose optimizer state is divided (ZeroRedundancyOptimizer)", "ddp", zero=True,
        clashes={
            "ddp": "zero1 is ddp, with its optimizer state divided",
            "fsdp": _DIVIDED,
            "hsdp": _DIVIDED,
            "tp": "tp has divided the parameters; take fsdp with it",
        },
    ),
    "fsdp": Strategy("parameters, gradients and optimizer state divided (fully_shard)", "fsdp"),
    "hsdp": Strategy(
        "fsdp in groups of ranks, a node's by default, and ddp between the groups", "fsdp",
        grouped=True, clashes={"fsdp": _GROUPS, "ddp": _GROUPS},
    ),
    "tp": Strategy("each layer computed by several ranks (parallelize_module)", "tp"),
    "pp": Strategy(
        "the model's parts in stages, one behind the other (torch.distributed.pipelining)", "pp"
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
    """The sizes of the mesh, and what they do not say.

    Args:
        zero: the optimizer state of the ddp ranks is divided among them.
        threads: one process drives all GPUs of its node, with threads.
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
        """How many ranks a batch is divided over."""
        return self.ddp * self.fsdp

    @property
    def plain(self) -> bool:
        """Whether each rank holds the whole model."""
        return self.pp == self.fsdp == self.tp == 1

    def place(self, rank: int) -> MeshPosition:
        """Where a global rank stands."""
        rank, tp = divmod(rank, self.tp)
        rank, fsdp = divmod(rank, self.fsdp)
        pp, ddp = divmod(rank, self.ddp)
        return MeshPosition(pp, ddp, fsdp, tp)

    def rank(self, place: MeshPosition) -> int:
        """The global rank of a place."""
        return ((place.pp * self.ddp + place.ddp) * self.fsdp + place.fsdp) * self.tp + place.tp

    def data_rank(self, rank: int) -> int:
        """Which share of a batch a global rank works on."""
        place = self.place(rank)
        return place.ddp * self.fsdp + place.fsdp

    def columns(self) -> tuple[list[str], Iterator[tuple[int, ...]]]:
        """What a table of the ranks says of their places: names, and numbers rank by rank. Where
        each rank holds the whole model its number says all: there is nothing more to tell."""
        if self.plain:
            return [], iter(())
        shown = [i for i, size in enumerate(self[:4]) if size > 1]
        rows = (
            (*(place[i] for i in shown), place[1] * self.fsdp + place[2])
            for place in product(*map(range, self[:4]))
        )
        return [*(FACTORS[i] for i in shown), "data"], rows

    def stream(self, rank: int) -> int:
        """Which random numbers a global rank draws: ranks of one tp group draw the same."""
        return rank // self.tp


def parse(text: str, where: str = "strategy") -> dict[str, int | None]:
    """Names and sizes as written; None for what is left over.

    Raises:
        UserError: a name is unknown or doubled, a size is none, or two take what is left.
    """
    sizes: dict[str, int | None] = {}
    for part in text.replace(" ", "").split(","):
        name, equals, size = part.partition("=")
        if name not in STRATEGIES:
            raise UserError(f"unknown strategy {name!r}", where=where,
                            hint=nearest(name, STRATEGIES, what="strategy"))  # fmt: skip
        if name in sizes:
            raise UserError(f"{name} is there twice in {text!r}", where=where, hint=_HINT)
        if equals and not (_SIZE.fullmatch(size) and int(size)):
            raise UserError(f"{name}={size} has no size", where=where, hint=_HINT)
        sizes[name] = int(size) if equals else None
    _check_product(text, sizes, where)
    return sizes


def _check_product(text: str, sizes: Mapping[str, int | None], where: str) -> None:
    """Refuse strategies that do not multiply, and sizes that say too little."""
    for name in ALONE:
        if name in sizes and len(sizes) > 1:
            raise UserError(f"{name} multiplies with nothing: {text!r}", where=where, hint=_HINT)
        if (most := STRATEGIES[name].devices) and sizes.get(name) not in (None, most):
            raise UserError(f"{name} is one process: {text!r}", where=where, hint=_HINT)
    open_ = [name for name, size in sizes.items() if size is None and not STRATEGIES[name].grouped]
    if len(open_) > 1:
        raise UserError(f"only one size can be left out in {text!r}", where=where, hint=_HINT)
    for first, row in STRATEGIES.items():
        for second, why in row.clashes.items() if first in sizes else ():
            if second in sizes:
                raise UserError(f"{first} and {second} do not go together: {why}", where=where)


def rows(text: str) -> list[Strategy]:
    """The rows of the table that a strategy is made of."""
    return [STRATEGIES[name] for name in parse(text)]


_SIZE = re.compile(r"[0-9]{1,9}")
_HINT = "write names and sizes, such as fsdp=4,tp=2; one size may be left out"


def layout(text: str, nodes: int, gpus: int, where: str = "strategy") -> Layout:
    """The mesh of a strategy on so many nodes with so many GPUs each.

    Raises:
        UserError: the sizes do not multiply to the number of ranks, with every one of them; or
            the strategy cannot have so many nodes.
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
            hint="the sizes multiply to the number of ranks; one may be left out",
        )
    for name in open_:
        sizes[name] = world // product
    mesh = {STRATEGIES[name].factor: size or 1 for name, size in sizes.items()}
    pp, ddp, fsdp, tp = (mesh.get(factor, 1) for factor in FACTORS)
    zero = ddp > 1 and any(STRATEGIES[name].zero for name in sizes)
    return Layout(pp, ddp, fsdp, tp, zero=zero)


def _alone(name: str, size: int | None, nodes: int, gpus: int, where: str) -> Layout:
    """The mesh of a strategy that is one process."""
    ranks = _ranks(nodes, gpus)
    if STRATEGIES[name].threads:
        if nodes > 1 or size not in (None, gpus):
            raise UserError(
                f"{name} is one process on one node, with all {gpus} GPUs of it: {ranks}",
                where=where,
                hint="ddp works on any number of nodes, and faster",
            )
        return Layout(threads=True)
    if nodes * gpus > STRATEGIES[name].devices:
        raise UserError(f"{name} is one process, but there are {ranks}", where=where,
                        hint="ask for --nodes 1 --gpus 1, or take ddp")  # fmt: skip
    return Layout()


def _ranks(nodes: int, gpus: int) -> str:
    world = nodes * gpus
    return f"{nodes} x {gpus} = {world} rank{'s' * (world > 1)}"


def _sizes(
    asked: dict[str, int | None], nodes: int, gpus: int, where: str
) -> dict[str, int | None]:
    """As asked; a group of ranks and the ddp between the groups as what they stand for."""
    sizes = dict(asked)
    grouped = next((name for name in sizes if STRATEGIES[name].grouped), None)
    if grouped is None:
        return sizes
    group = sizes.pop(grouped)
    if group is None:
        group = gpus // (sizes.get("tp") or 1)
        if nodes == 1 or group < 2:
            raise UserError(
                f"{grouped} divides within a node and copies between nodes, and there "
                + ("is one node" if nodes == 1 else "is one rank of a node left"),
                where=where,
                hint=f"write how many ranks divide, such as {grouped}=2, or take fsdp or ddp",
            )
    if any(size is None for size in sizes.values()):
        raise UserError(f"{grouped} takes what is left for ddp", where=where, hint=_HINT)
    return {**sizes, "ddp": None, STRATEGIES[grouped].factor: group}


def is_single(text: str) -> bool:
    """Whether a strategy is one process on one device: the reference of all others."""
    return any(row.devices == 1 for row in rows(text))


def processes(text: str, gpus: int) -> int:
    """How many ranks a node has: one where threads drive its GPUs."""
    return 1 if any(row.threads for row in rows(text)) else gpus
