"""The tensors of a checkpoint: all of the training, under plain names.

    model.<name>                 parameters and buffers, with the names of the plain module
    optim.<name>.<state>         the optimizer's tensors, by the name of the parameter
    rng.<stream>.<generator>     the random generators of every rank; a tp group shares them
    more                         the user's further object, as written by torch.save
    hook.<rank>.<bucket>.<what>  PowerSGD's memory

The names do not depend on the strategy; a rank has some of the tensors, or parts of them. ``parts``
returns the live ones, in a millisecond: a save copies them, a restore fills them.
"""

from __future__ import annotations

import heapq
import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hpcddp.errors import CheckpointError
from hpcddp.train.input import seeding
from hpcddp.train.parallel.optim import own
from hpcddp.train.rank import without_numpy
from hpcddp.train.rank.spread import local

MORE = "more"


class Where(NamedTuple):
    """The part of a tensor that a rank has, and the ranks that have the same part."""

    size: torch.Size
    offsets: tuple[int, ...]
    holders: tuple[int, ...]  # global ranks, this one among them

    def nothing(self, part: Tensor) -> bool:
        """Whether this rank has none of it, as with more ranks than rows."""
        return part.numel() == 0 and self.size.numel() > 0


Holders = Callable[[Tensor, bool], tuple[int, ...]]  # True: the optimizer's tensor


@dataclass
class Parts:
    """A rank's live tensors, and the numbers in the optimizer's state.

    Args:
        stepped: tensors that only an optimizer step changes: the optimizer's parameters and state.
        loose: tensors that a forward pass may change: buffers and other parameters.
        where: the part of each tensor.
        plain: the optimizer's numbers, by parameter and name.
        module: the module's state_dict, which has the same tensors.
    """

    stepped: dict[str, Tensor] = field(default_factory=dict)
    loose: dict[str, Tensor] = field(default_factory=dict)
    where: dict[str, Where] = field(default_factory=dict)
    plain: dict[str, dict[str, Any]] = field(default_factory=dict)
    module: dict[str, Any] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {**self.stepped, **self.loose}

    @property
    def mine(self) -> dict[str, Tensor]:
        """Those of which this rank has a part."""
        return {name: t for name, t in self.tensors.items() if not self.where[name].nothing(t)}

    def add(self, kind: dict[str, Tensor], name: str, tensor: Tensor, who: tuple[int, ...]) -> None:
        kind[name] = local(tensor)
        self.where[name] = Where(tensor.size(), _offsets(tensor), who)


def alone(tensor: Tensor, optim: bool) -> tuple[int, ...]:
    """The holders in a run of one rank."""
    return (0,)


class Resting:
    """A module's tensors as they are between two steps: within a pass, fully_shard has gathered
    ones in their place."""

    def __init__(self, module: nn.Module) -> None:
        self.state, self.name_of = module.state_dict(), naming(module)
        self.parameters = dict(module.named_parameters(remove_duplicate=False))
        self.first = list(module.named_parameters())  # each under one name


@torch.no_grad()
def parts(module: nn.Module | Resting, optimizer: Optimizer, holders: Holders = alone) -> Parts:
    """The tensors of a module and its optimizer, without a copy.

    Raises:
        CheckpointError: the module's state has an entry that is not a tensor.
    """
    rest = module if isinstance(module, Resting) else Resting(module)
    parts, name_of, inner = Parts(module=rest.state), rest.name_of, own(optimizer)
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, value in parts.module.items():
        kind = parts.stepped if id(rest.parameters.get(name)) in trained else parts.loose
        tensor = _tensor(name, value)
        parts.add(kind, f"model.{name_of(name)}", tensor, holders(tensor, False))
    for name, parameter in rest.first:
        for key, value in inner.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                full = f"optim.{name_of(name)}.{key}"
                parts.add(parts.stepped, full, value, holders(value, True))
            else:
                parts.plain.setdefault(name_of(name), {})[key] = value
    return parts


def sizes(module: nn.Module) -> dict[str, torch.Size]:
    """The sizes of a whole model's tensors, by their names in a checkpoint.

    Raises:
        CheckpointError: the module's state has an entry that is not a tensor.
    """
    name_of = naming(module)
    return {f"model.{name_of(n)}": _tensor(n, v).size() for n, v in module.state_dict().items()}


def _offsets(tensor: Tensor) -> tuple[int, ...]:
    """The offsets of a rank's part in the whole tensor."""
    if hasattr(tensor, "placements"):
        (chunk,) = tensor.__create_chunk_list__()  # type: ignore[attr-defined]
        return tuple(chunk.offsets)
    return (0,) * tensor.dim()


def naming(module: nn.Module) -> Callable[[str], str]:
    """A function from a parameter's name to its plain name, without the prefixes of torch.compile
    and of DDP inside of the model."""
    inner = [
        f"{name}.module."
        for name, part in module.named_modules()
        if isinstance(part, DistributedDataParallel)
    ]

    def plain(name: str) -> str:
        for prefix in inner:
            if name.startswith(prefix):
                name = prefix.removesuffix("module.") + name.removeprefix(prefix)
        return name.replace("_orig_mod.", "")

    return plain


def _tensor(name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise CheckpointError(
            f"the model's state {name} is not a tensor",
            hint="register it as a buffer: checkpoints hold only tensors",
        )
    return value


def share(
    tensors: Mapping[str, Tensor], where: Mapping[str, Where], rank: int
) -> dict[str, Tensor]:
    """The tensors that this rank writes, of those that several ranks hold. All write about the same
    amount; every holder computes the same division: largest first, to the rank with least."""
    loads: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    written = {}
    for name in sorted(tensors, key=lambda n: (-tensors[n].nbytes, n)):
        holders = where[name].holders
        if where[name].nothing(tensors[name]):
            continue
        heap = loads.setdefault(holders, [(0, r) for r in holders])
        load, owner = heapq.heappop(heap)
        heapq.heappush(heap, (load + tensors[name].nbytes, owner))
        if owner == rank:
            written[name] = tensors[name]
    return written


def rng_tensors(stream: int, device: torch.device) -> dict[str, Tensor]:
    """This rank's random generators, by their names in a checkpoint."""
    return {f"rng.{stream}.{k}": v for k, v in seeding.rng_state(device).items()}


def set_rng(tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Restore the result of ``rng_tensors``."""
    state = {name.rsplit(".", 1)[1]: tensor for name, tensor in tensors.items()}
    seeding.set_rng_state(state, device)


def pack(more: Any) -> dict[str, Tensor]:
    """The state of the user's further object, as one tensor of bytes.

    Raises:
        CheckpointError: reading the state would need to run code.
    """
    file = io.BytesIO()
    torch.save(more.state_dict(), file)
    tensor = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    try:
        unpack({MORE: tensor})
    except pickle.UnpicklingError as error:
        first = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"the state of {type(more).__name__} cannot be saved: {first}",
            hint="use only tensors, numbers, strings, lists and dictionaries in it",
        ) from None
    return {MORE: tensor}


def unpack(tensors: Mapping[str, Tensor]) -> Any:
    """The state from a result of ``pack``; none of its content is run."""
    data = io.BytesIO(without_numpy.content(tensors[MORE].contiguous()))
    return torch.load(data, map_location="cpu", weights_only=True)
