"""What a checkpoint holds: every tensor of the training under a plain name, and the rest as JSON.

    model.<name>                 parameters and buffers, named as the plain module names them
    optim.<name>.<state>         the optimizer's tensors, by the parameter they belong to
    rng.<rank>.<generator>       the random generators of every rank
    more                         what else a loop has, as torch.save wrote it

A save names the live tensors itself (`parts`), in a millisecond. A restore goes through torch's own
getters and setters, which give the same names however the model is spread.
"""

from __future__ import annotations

import copy
import heapq
import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hpcddp.errors import CheckpointError
from hpcddp.train import seeding

MORE = "more"


@dataclass
class Parts:
    """A training's tensors, live, by what changes them; and the numbers in the optimizer's state.

    Args:
        stepped: only an optimizer step: parameters that the optimizer has, and its own tensors.
        loose: also a forward pass: buffers, and parameters that the optimizer has not.
        plain: by parameter and name.
    """

    stepped: dict[str, Tensor] = field(default_factory=dict)
    loose: dict[str, Tensor] = field(default_factory=dict)
    plain: dict[str, dict[str, Any]] = field(default_factory=dict)


def parts(module: nn.Module, optimizer: Optimizer) -> Parts:
    """The tensors of a module and its optimizer, without a copy.

    Raises:
        CheckpointError: the module's state holds something else than tensors.
    """
    found, name_of = Parts(), _naming(module)
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    own = dict(module.named_parameters(remove_duplicate=False))
    for name, value in module.state_dict().items():
        kind = found.stepped if id(own.get(name)) in trained else found.loose
        kind[f"model.{name_of(name)}"] = _tensor(name, value)
    for name, parameter in module.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                found.stepped[f"optim.{name_of(name)}.{key}"] = value
            else:
                found.plain.setdefault(name_of(name), {})[key] = value
    return found


def _naming(module: nn.Module) -> Callable[[str], str]:
    """What makes a name plain: without what DDP around a part and torch.compile put in."""
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
            hint="checkpoints hold tensors only: register it as a buffer",
        )
    return value


def share(tensors: Mapping[str, Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
    """The part of tensors that all ranks have alike which this rank writes; all write about as
    much. Every rank comes to the same division: largest first, to whoever has least."""
    loads = [(0, r) for r in range(ranks)]
    mine = {}
    for name in sorted(tensors, key=lambda n: (-tensors[n].nbytes, n)):
        load, owner = heapq.heappop(loads)
        heapq.heappush(loads, (load + tensors[name].nbytes, owner))
        if owner == rank:
            mine[name] = tensors[name]
    return mine


def groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The optimizer's options by parameter group, as plain data."""
    return [
        {k: _plain(v) for k, v in group.items() if k != "params"}
        for group in optimizer.param_groups
    ]


class State:
    """A module and its optimizer as flat tensors, which are the live ones: reading into them
    and then calling ``apply`` restores the training.

    On an optimizer that took no step yet, this makes its state.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        self._module, self._optimizer = module, optimizer
        self._model, self._optim = get_state_dict(module, optimizer)
        self.tensors: dict[str, Tensor] = {
            f"model.{name}": _tensor(name, value) for name, value in self._model.items()
        }
        for name, states in self._states.items():
            for key, value in states.items():
                if isinstance(value, Tensor):
                    self.tensors[f"optim.{name}.{key}"] = value

    @property
    def _states(self) -> dict[str, dict[str, Any]]:
        states: dict[str, dict[str, Any]] = self._optim["state"]  # type: ignore[assignment]
        return states

    def only(self, names: set[str]) -> None:
        """Forget optimizer state that a checkpoint has not: its parameters had no gradient."""
        for name, states in list(self._states.items()):
            for key in list(states):
                if isinstance(states[key], Tensor) and f"optim.{name}.{key}" not in names:
                    del states[key], self.tensors[f"optim.{name}.{key}"]
            if not states:
                del self._states[name]

    def apply(self, meta: Mapping[str, Any], *, options: bool) -> None:
        """Put the state into module and optimizer.

        Args:
            meta: what ``groups`` and ``Parts.plain`` were when it was saved.
            options: restore the optimizer's options too; without, the job file's count.
        """
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

        for name, values in meta["state"].items():
            self._states.setdefault(name, {}).update(values)
        live = [dict(group) for group in self._optimizer.param_groups]
        set_state_dict(
            self._module,
            self._optimizer,
            model_state_dict=self._model,
            optim_state_dict=self._optim,
            options=StateDictOptions(strict=False),  # see `only`; names were compared before
        )
        saved = meta["param_groups"]
        for i, group in enumerate(self._optimizer.param_groups):
            group.update({k: v for k, v in live[i].items() if k != "params"})
            if options and len(saved) == len(live):
                group.update(like(saved[i], live[i]))


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value


def like(value: Any, live: Any) -> Any:
    """A value from JSON in the types that the live one has, whatever lies in it: JSON knows no
    tensors, tuples or Counters, and no keys but text."""
    if isinstance(live, Tensor):
        return torch.as_tensor(value, dtype=live.dtype, device=live.device)
    if isinstance(value, dict) and isinstance(live, dict):
        return _like_dict(value, live)
    if isinstance(value, list) and isinstance(live, list | tuple):
        same = len(value) == len(live)
        items = [like(v, o) for v, o in zip(value, live, strict=True)] if same else value
        return tuple(items) if isinstance(live, tuple) else items
    return value


def _like_dict(value: dict[str, Any], live: dict[Any, Any]) -> dict[Any, Any]:
    keys, kinds = {str(key): key for key in live}, {type(key) for key in live}
    kind = kinds.pop() if kinds in ({int}, {float}) else str
    made = copy.copy(live)
    made.clear()
    for name, item in value.items():
        key = keys[name] if name in keys else kind(name)
        made[key] = like(item, live.get(key))
    return made


def rng_tensors(rank: int, device: torch.device) -> dict[str, Tensor]:
    """This rank's random generators, by their names in a checkpoint."""
    return {f"rng.{rank}.{k}": v for k, v in seeding.rng_state(device).items()}


def set_rng(tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Put back what ``rng_tensors`` gave."""
    state = {name.rsplit(".", 1)[1]: tensor for name, tensor in tensors.items()}
    seeding.set_rng_state(state, device)


def pack(more: Any) -> dict[str, Tensor]:
    """What else has a state_dict, as one tensor of bytes.

    Raises:
        CheckpointError: it holds what nobody could read without running it.
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
            hint="checkpoints hold tensors, numbers, texts, lists and dictionaries",
        ) from None
    return {MORE: tensor}


def unpack(tensors: Mapping[str, Tensor]) -> Any:
    """The state that ``pack`` took; nothing in it is run."""
    data = io.BytesIO(bytes(tensors[MORE].numpy()))
    return torch.load(data, map_location="cpu", weights_only=True)
