"""What a forward pass may change of a complete step: copies of it, and a check of the rest."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, nn

from hpcddp.train.parallel import state_dict
from hpcddp.train.parallel.state_dict import Parts, Resting


class LooseCopies:
    """Copies of a module's buffers, which a module may also replace in a forward pass; and whether
    its parameters are as they were, since a script may put others in their place for a while, such
    as averages for an evaluation.

    Args:
        divided: ``fully_shard`` or ``parallelize_module`` have made the parameters: they replace
            them within a pass.
    """

    def __init__(self, module: nn.Module, *, divided: bool) -> None:
        self._module, self._resting = module, Resting(module) if divided else None
        rest = self._resting or Resting(module)
        self._owners = dict(_owners(module, rest))
        self._parameters = [] if divided else list(rest.parameters.values())
        self._versions: list[int] = []
        self._copies: dict[str, Tensor] = {}
        self._buffers: list[Tensor] = []  # those that were copied last

    def __len__(self) -> int:
        return len(self._owners)

    @torch.no_grad()
    def take(self) -> None:
        """Copy the buffers, and note the parameters."""
        now = [owner[key] for owner, key in self._owners.values()]
        if len(self._buffers) != len(now) or any(map(operator.is_not, self._buffers, now)):
            copies = (buffer.detach().clone() for buffer in now)
            self._copies = dict(zip(self._owners, copies, strict=True))
        elif now:
            torch._foreach_copy_([*self._copies.values()], now)
        self._buffers = now
        self._versions = [parameter._version for parameter in self._parameters]

    def parts(self, optimizer: torch.optim.Optimizer, holders: state_dict.Holders) -> Parts:
        """The live tensors, with the copies in the place of the buffers."""
        parts = state_dict.parts(self._resting or self._module, optimizer, holders)
        parts.loose.update(self._copies)
        return parts

    def sound(self, parts: Parts) -> bool:
        """Whether the parameters are as they were, and all numbers that the optimizer changes are
        finite."""
        if self._versions != [parameter._version for parameter in self._parameters]:
            return False
        floats = (t for t in parts.stepped.values() if t.is_floating_point())
        return all(bool(torch.isfinite(tensor).all()) for tensor in floats)


def _owners(module: nn.Module, rest: Resting) -> Any:
    """The name of each saved buffer in a checkpoint, and the dictionary that holds it, with its key
    there."""
    for name in rest.state:
        path, _, key = name.rpartition(".")
        owner = module.get_submodule(path)._buffers
        if isinstance(owner.get(key), Tensor):
            yield f"model.{rest.name_of(name)}", (owner, key)
