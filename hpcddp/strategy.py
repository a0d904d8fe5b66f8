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
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from hpcddp.errors import UserError
from hpcddp.keys import nearest

FACTORS = ("pp", "ddp", "fsdp", "tp")
STRATEGIES = {
    "single": "one process on one device",
    "dp": "nn.DataParallel: one process, all GPUs of one node",
    "ddp": "a replica on each rank, gradients averaged",
    "zero1": "ddp whose optimizer state is divided (ZeroRedundancyOptimizer)",
    "fsdp": "parameters, gradients and optimizer state divided (fully_shard)",
    "hsdp": "fsdp in groups of ranks, a node's by default, and ddp between the groups",
    "tp": "each layer computed by several ranks (parallelize_module)",
    "pp": "the model's parts in stages, one behind the other (torch.distributed.pipelining)",
}
ALONE = ("single", "dp")  # one process; they multiply with nothing


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
        found = [f"{name}={size}" for name, size in sizes if size > 1]
        text = ",".join(found) or "single"
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
    found: dict[str, int | None] = {}
    for part in text.replace(" ", "").split(","):
        name, equals, size = part.partition("=")
        if name not in STRATEGIES:
            raise UserError(f"unknown strategy {name!r}", where=where,
                            hint=nearest(name, STRATEGIES, what="strategy"))  # fmt: skip
        if name in found:
            raise UserError(f"{name} is there twice in {text!r}", where=where, hint=_HINT)
        if equals and not (_SIZE.fullmatch(size) and int(size)):
            raise UserError(f"{name}={size} has no size", where=where, hint=_HINT)
        found[name] = int(size) if equals else None
    for name in ALONE:
        if name in found and len(found) > 1:
            raise UserError(f"{name} multiplies with nothing: {text!r}", where=where, hint=_HINT)
    if found.get("single") not in (None, 1):
        raise UserError(f"single is one process: {text!r}", where=where, hint=_HINT)
    if len([n for n, size in found.items() if size is None and n != "hsdp"]) > 1:
        raise UserError(f"only one size can be left out in {text!r}", where=where, hint=_HINT)
    for first, second, why in _CLASHES:
        if first in found and second in found:
            raise UserError(f"{first} and {second} do not go together: {why}", where=where)
    return found


_SIZE = re.compile(r"[0-9]{1,9}")
_HINT = "write names and sizes, such as fsdp=4,tp=2; one size may be left out"
_CLASHES = (
    ("zero1", "ddp", "zero1 is ddp, with its optimizer state divided"),
    ("zero1", "fsdp", "fsdp divides the optimizer state already"),
    ("zero1", "hsdp", "fsdp divides the optimizer state already"),
    ("zero1", "tp", "tp has divided the parameters; take fsdp with it"),
    ("hsdp", "fsdp", "hsdp is fsdp in groups; the rest is ddp"),
    ("hsdp", "ddp", "hsdp is fsdp in groups; the rest is ddp"),
)


def layout(text: str, nodes: int, gpus: int, where: str = "strategy") -> Layout:
    """The mesh of a strategy on so many nodes with so many GPUs each.

    Raises:
        UserError: the sizes do not multiply to the number of ranks, with every one of them; or
            the strategy cannot have so many nodes.
    """
    asked, world = parse(text, where), nodes * gpus
    ranks = f"{nodes} x {gpus} = {world} rank{'s' * (world > 1)}"
    if "dp" in asked:
        if nodes > 1 or asked["dp"] not in (None, gpus):
            raise UserError(
                f"dp is one process on one node, with all {gpus} GPUs of it: {ranks}",
                where=where,
                hint="ddp works on any number of nodes, and faster",
            )
        return Layout(threads=True)
    if "single" in asked:
        if world > 1:
            raise UserError(f"single is one process, but there are {ranks}", where=where,
                            hint="ask for --nodes 1 --gpus 1, or take ddp")  # fmt: skip
        return Layout()
    sizes = _sizes(asked, nodes, gpus, where)
    product = math.prod(size for size in sizes.values() if size)
    open_ = [name for name, size in sizes.items() if size is None]
    if world % product or (not open_ and product != world):
        factors = " x ".join(f"{name}={size}" for name, size in sizes.items() if size)
        raise UserError(
            f"{factors} = {product}, but there are {ranks}",
            where=where,
            hint="the sizes multiply to the number of ranks; one may be left out",
        )
    for name in open_:
        sizes[name] = world // product
    zero = sizes.pop("zero1", None) or 1
    pp, ddp, fsdp, tp = (sizes.get(name) or 1 for name in FACTORS)
    return Layout(pp, ddp * zero, fsdp, tp, zero=zero > 1)


def _sizes(
    asked: dict[str, int | None], nodes: int, gpus: int, where: str
) -> dict[str, int | None]:
    """As asked; hsdp as what it stands for."""
    sizes = dict(asked)
    if "hsdp" not in sizes:
        return sizes
    group = sizes.pop("hsdp")
    if group is None:
        inside = math.prod(size for size in (sizes.get("tp"),) if size)
        group = gpus // inside
        if nodes == 1 or group < 2:
            raise UserError(
                "hsdp divides within a node and copies between nodes, and there "
                + ("is one node" if nodes == 1 else "is one rank of a node left"),
                where=where,
                hint="write how many ranks divide, such as hsdp=2, or take fsdp or ddp",
            )
    if any(size is None for size in sizes.values()):
        raise UserError("hsdp takes what is left for ddp", where=where, hint=_HINT)
    return {**sizes, "ddp": None, "fsdp": group}


def processes(text: str, gpus: int) -> int:
    """How many ranks a node has: one where threads drive its GPUs."""
    return 1 if "dp" in parse(text) else gpus
