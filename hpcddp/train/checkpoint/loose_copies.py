"""What a forward pass may change of a complete step: copies of it, and a check of the rest."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hpcddp.train.parallel import state_dict
from hpcddp.train.parallel.state_dict import Parts, Resting
from hpcddp.train.rank.spread import local

SAMPLES = 16  # tensors of which one number is noted, at least


class LooseCopies:
    """Copies of a module's buffers, which a module may also replace in a forward pass; and whether
    its parameters are as they were, since a script may put others in their place for a while, such
    as averages for an evaluation.

    Args:
        beside: another module that is saved; it must be as it was too.
        optimizer: changes some of the parameters.
        divided: ``fully_shard`` or ``parallelize_module`` have made the parameters: they replace
            them within a pass.

    Raises:
        KeyError: the module saves what is neither a parameter nor a buffer.
    """

    def __init__(
        self,
        module: nn.Module,
        beside: nn.Module | None,
        optimizer: torch.optim.Optimizer,
        *,
        divided: bool,
    ) -> None:
        self._module, self._resting = module, Resting(module) if divided else None
        rest = self._resting or Resting(module)
        self._owners = dict(_owners(module, rest))
        self._known = {f"model.{rest.name_of(name)}": p for name, p in rest.parameters.items()}
        # A mask may have them, among parameters that are never changed.
        self._infinite = {name for name, p in self._known.items() if not _finite(p)}
        self._watched: list[Tensor] = [] if divided else [*rest.parameters.values()]
        self._watched += [*beside.parameters(), *beside.buffers()] if beside else []
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._others = [p for p in rest.parameters.values() if id(p) not in trained]
        self._first = _numbers(self._others)
        # Reading a number of a GPU would wait for it.
        on_host = [t for t in self._watched if t.device.type == "cpu" and t.numel()]
        self._samples = on_host[:: max(1, len(on_host) // SAMPLES)]
        self._places: list[int] = []  # in memory, of those that are watched
        self._numbers: list[tuple[Any, Tensor]] = []  # the memory of a number of each sample
        self._marks: list[Any] = []
        self.copies: dict[str, Tensor] = {}  # as of the last ``take``
        self._buffers: list[Tensor] = []  # those that were copied last
        self._noted: list[tuple[Tensor, int]] = []

    def __len__(self) -> int:
        return len(self._owners)

    def note(self) -> None:
        """Note which buffers there are, and their versions."""
        self._noted = self._versions()

    def as_noted(self) -> bool:
        """Whether nothing has changed a buffer since ``note``. A norm counts its passes in one."""
        pairs = zip(self._noted, self._versions(), strict=False)
        return all(one is now and version == newer for (one, version), (now, newer) in pairs)

    def _versions(self) -> list[tuple[Tensor, int]]:
        buffers = (owner.get(key) for owner, key in self._owners.values())
        there = (buffer for buffer in buffers if buffer is not None)  # else ``take`` raises
        return [(each, 0 if each.is_inference() else each._version) for each in there]

    def take(self) -> None:
        """Copy the buffers, and note the parameters.

        Raises:
            KeyError: the module has lost a buffer.
            RuntimeError: a parameter has lost its memory.
        """
        if self._owners:
            self._copy()
        self._marks = self._look()

    @torch.no_grad()
    def _copy(self) -> None:
        now = [owner[key] for owner, key in self._owners.values()]
        if any(buffer is None for buffer in now):
            raise KeyError("a buffer")
        if len(self._buffers) != len(now) or any(map(operator.is_not, self._buffers, now)):
            copies = (buffer.detach().clone() for buffer in now)
            self.copies = dict(zip(self._owners, copies, strict=True))
        else:
            torch._foreach_copy_([*self.copies.values()], now)
        self._buffers = now

    def _look(self) -> list[Any]:
        """What changes with a parameter: its version, its memory or, as ``.data`` counts no
        version, a number in it."""
        if self._places != (places := [tensor.data_ptr() for tensor in self._watched]):
            self._places, self._numbers = places, [*map(_memory, self._samples)]
        versions = [tensor._version for tensor in self._watched]
        return [places, versions, [number.raw for number, _ in self._numbers]]

    def parts(
        self,
        optimizer: torch.optim.Optimizer,
        holders: state_dict.Holders,
        copies: Mapping[str, Tensor],
    ) -> Parts:
        """The live tensors, with copies in the place of the buffers."""
        parts = state_dict.parts(self._resting or self._module, optimizer, holders)
        parts.loose.update(copies)
        return parts

    def same(self) -> bool:
        """Whether all that is not copied is as it was."""
        return self._marks == self._look()

    def untouched(self, number: Callable[[Tensor], float | complex]) -> bool:
        """Whether nothing has ever changed the parameters that the optimizer does not: an average
        of the others may be one. Of each, one number is looked at.

        Args:
            number: reads one of the device.
        """
        return self._first == _numbers(self._others, number)

    def known(self, parts: Parts) -> bool:
        """Whether the tensors are those that were noted, and no others."""
        return not parts.loose.keys() - self.copies.keys() - self._known.keys()

    def finite(self, parts: Parts) -> bool:
        """Whether all numbers that the optimizer changes are finite."""
        stepped = (tensor for name, tensor in parts.stepped.items() if name not in self._infinite)
        return all(map(_finite, stepped))


def _numbers(
    tensors: Sequence[Tensor], number: Callable[[Tensor], float | complex] = Tensor.item
) -> list[float | complex]:
    """A number of each tensor."""
    parts = (local(tensor.detach()) for tensor in tensors)
    return [number(part[(-1,) * part.dim()]) for part in parts if part.numel()]


def _memory(tensor: Tensor) -> tuple[Any, Tensor]:
    """The memory of a tensor's last number, and the number, which keeps it: to read the memory
    takes 0.1 us, the tensor 3 us.

    Raises:
        RuntimeError: a script has freed it, or it never had any.
    """
    part = local(tensor.detach())
    last = part[(-1,) * part.dim()]
    if not last.data_ptr():
        raise RuntimeError("a parameter has no memory")
    return (ctypes.c_char * last.element_size()).from_address(last.data_ptr()), last


def _finite(tensor: Tensor) -> bool:
    part = local(tensor.detach())
    return not part.is_floating_point() or bool(torch.isfinite(part).all())


def _owners(module: nn.Module, rest: Resting) -> Any:
    """The name of each saved buffer in a checkpoint, and the dictionary that holds it, with its key
    there."""
    parts = dict(module.named_modules(remove_duplicate=False))
    for name in rest.state.keys() - rest.parameters.keys():
        path, _, key = name.rpartition(".")
        owner = parts[path]._buffers
        if not isinstance(owner[key], Tensor):
            raise KeyError(name)
        yield f"model.{rest.name_of(name)}", (owner, key)
