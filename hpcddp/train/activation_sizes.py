"""Measures one forward pass: the bytes that it keeps for the backward pass, and those that ranks
would send.

Each byte counts for the part of the model that runs. A piece of memory counts once, for the part
that keeps it first; parameters and buffers do not count.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


class Watch:
    """Counts the bytes of one pass through a model.

    Args:
        parts: names of modules, one called after the other.
        blocks: names of modules that are recomputed; their activations do not count.
        plan: names of layers that ranks share -> True if the ranks sum the layer's outputs in the
            forward pass, False if they sum its input gradients in the backward pass.

    ``saved``, ``passed`` and ``reduced`` go by part; ``inner`` is the largest block's inside.
    """

    def __init__(
        self,
        module: nn.Module,
        parts: Sequence[str],
        blocks: Collection[str] = (),
        plan: Mapping[str, bool] | None = None,
    ) -> None:
        self._own = {id_of(t) for t in [*module.parameters(), *module.buffers()]}
        self._kept: list[Tensor] = []  # so that no other tensor reuses the memory
        self._seen: set[int] = set()
        self._part, self._block = 0, ""
        self._last = 0  # bytes that the block's newest layer has summed
        self._inside: dict[str, int] = {}
        self.saved, self.passed, self.reduced = ([0] * len(parts) for _ in range(3))
        self._hooks: list[Any] = []
        for i, name in enumerate(parts):
            self._on(module, name, self._begin_part(i), self._end_part(i))
        for name in blocks:
            self._on(module, name, self._begin_block(name), self._end_block)
        for name, adds_outputs in (plan or {}).items():
            self._on(module, name, None, self._add_up(adds_outputs))

    @property
    def inner(self) -> int:
        return max(self._inside.values(), default=0)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Count within this context."""
        with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor):
            yield
        for hook in self._hooks:
            hook.remove()

    def _on(self, module: nn.Module, name: str, before: Any, after: Any) -> None:
        part = module.get_submodule(name)
        if before:
            self._hooks.append(part.register_forward_pre_hook(before))
        self._hooks.append(part.register_forward_hook(after))

    def _keep(self, tensor: Tensor) -> Tensor:
        key = id_of(tensor)
        if key not in self._own and key not in self._seen:
            self._seen.add(key)
            self._kept.append(tensor)
            size = tensor.untyped_storage().nbytes()
            if self._block:
                self._inside[self._block] = self._inside.get(self._block, 0) + size
            else:
                self.saved[self._part] += size
        return tensor

    def _begin_part(self, number: int) -> Callable[..., None]:
        def begin(module: nn.Module, given: Any) -> None:
            self._part = number

        return begin

    def _end_part(self, number: int) -> Callable[..., None]:
        def end(module: nn.Module, given: Any, made: Any) -> None:
            self.passed[number] += size_of(made)

        return end

    def _begin_block(self, name: str) -> Callable[..., None]:
        def begin(module: nn.Module, given: Any) -> None:
            for tensor in tensors(given):  # the block is recomputed from its inputs
                self._keep(tensor)
            self._block = name

        return begin

    def _end_block(self, module: nn.Module, given: Any, made: Any) -> None:
        self._block, self._last = "", 0

    def _add_up(self, outputs: bool) -> Callable[..., None]:
        def end(module: nn.Module, given: Any, made: Any) -> None:
            size = size_of(made if outputs else [t for t in tensors(given) if t.requires_grad])
            self.reduced[self._part] += size
            if outputs and self._block:  # recomputed, except for the last one: nothing needs it
                self.reduced[self._part] += self._last
                self._last = size

        return end


def id_of(tensor: Tensor) -> int:
    """An identifier of a piece of memory while it exists."""
    return int(tensor.untyped_storage()._cdata)


def tensors(value: Any) -> list[Tensor]:
    """The tensors in lists, tuples and dicts."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def size_of(value: Any) -> int:
    """Bytes of the tensors in a value."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors(value))
