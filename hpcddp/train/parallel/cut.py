"""Divides a model: into blocks for fsdp and recomputation, and into stages for pp.

A task's own functions come first (task.CUTS); otherwise the model's structure decides, if possible.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from hpcddp.errors import JobFileError
from hpcddp.train.rank.task_module import Task


def blocks(task: Task, module: nn.Module) -> list[str]:
    """Names of the model's repeated parts: from the task, or the members of the largest list of
    modules. Empty if there is no such list."""
    own = task.cut("blocks", module)
    if own is not None:
        names = known(own, module, task, "blocks")
        for name in names:
            if not _has_forward(module.get_submodule(name)):
                raise JobFileError(
                    f"blocks() names {name}, which has no forward()",
                    where=task.name,
                    hint="name the modules inside it",
                )
        return names
    lists = {
        name: part
        for name, part in module.named_modules()
        if isinstance(part, nn.ModuleList | nn.Sequential) and len(part) > 1
    }
    if not lists:
        return []
    largest = max(lists, key=lambda name: _size(lists[name]))
    return [name for name in _called(lists[largest], largest) if _size(module.get_submodule(name))]


def _called(group: nn.Module, path: str) -> list[str]:
    """Names of a group's members; for a list among them, which has no forward, its members."""
    names: list[str] = []
    for name, part in group.named_children():
        full = f"{path}.{name}" if path else name
        names += [full] if _has_forward(part) else _called(part, full)
    return names


def _has_forward(part: nn.Module) -> bool:
    return type(part).forward is not nn.Module.forward


def parts(task: Task, module: nn.Module) -> list[str]:
    """Names of modules that, called in this order, are the model.

    Raises:
        JobFileError: the order is unknown, or a parameter is in none of the modules.
    """
    own = task.cut("parts", module)
    if own is None and not isinstance(module, nn.Sequential):
        raise JobFileError(
            f"pp cannot divide a {type(module).__name__}: the order of its parts is unknown",
            where=task.name,
            hint="use an nn.Sequential, or define parts(model): names of modules that, called in "
            "this order, are the model",
        )
    names = [n for n, _ in members(module)]
    names = names if own is None else known(own, module, task, "parts")
    inside = {id(p) for name in names for p in _tensors(module.get_submodule(name))}
    for name, tensor in _named_tensors(module):
        if id(tensor) not in inside:
            raise JobFileError(
                f"parts() leaves out {name}",
                where=task.name,
                hint="return modules that together contain all parameters and buffers",
            )
    return names


def members(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """A module's children; unlike named_children, with the second use of one."""
    return [(name, part) for name, part in module._modules.items() if part is not None]


def known(names: Any, module: nn.Module, task: Task, function: str) -> list[str]:
    """The names that a task's function returns.

    Raises:
        JobFileError: the model has no such module.
    """
    modules = dict(module.named_modules(remove_duplicate=False))
    for name in names:
        if name not in modules:
            raise JobFileError(
                f"{function}() names {name!r}, which is not in the model",
                where=task.name,
                hint="use names from model.named_modules()",
            )
    return list(names)


def stages(task: Task, module: nn.Module, count: int) -> list[list[str]]:
    """The parts of each of ``count`` stages, of about equal size.

    Raises:
        JobFileError: there are fewer parts with parameters than stages, or two stages share one.
    """
    names = parts(task, module)
    sizes = [_size(module.get_submodule(name)) for name in names]
    full = sum(size > 0 for size in sizes)
    if full < count:
        raise JobFileError(
            f"pp cannot make {count} stages from {full} parts: {', '.join(names)}",
            where=task.name,
            hint="use fewer stages, or divide the model into smaller parts",
        )
    stages = [[names[i] for i in piece] for piece in divide(sizes, count)]
    owner: dict[int, int] = {}
    for stage, inside in enumerate(stages):
        for name in inside:
            for tensor in _tensors(module.get_submodule(name)):
                if owner.setdefault(id(tensor), stage) != stage:
                    raise JobFileError(
                        f"a parameter of {name} is shared with another stage of the pipeline",
                        where=task.name,
                        hint="give each stage its own parameter, or use fsdp",
                    )
    return stages


def divide(sizes: Sequence[int], count: int) -> list[range]:
    """Divide neighbours into ``count`` groups, none of size 0, with the largest as small as
    possible; of equal divisions, the one with larger first groups."""

    @functools.cache
    def best(begin: int, groups: int) -> tuple[int, int]:
        """The size of the largest group from ``begin`` on, and the end of the first one."""
        if groups == 1:
            return sum(sizes[begin:]) or _NEVER, len(sizes)
        least = (_NEVER, begin)
        for end in range(begin + 1, len(sizes)):
            if size := sum(sizes[begin:end]):
                least = min(least, (max(size, best(end, groups - 1)[0]), -end))
        return least[0], -least[1]

    ends = [0]
    for groups in range(count, 0, -1):
        ends.append(best(ends[-1], groups)[1])
    return [range(a, b) for a, b in itertools.pairwise(ends)]


_NEVER = 1 << 62


class Chain(nn.Module):
    """Some parts of a model under their own names, called one after the other.

    A call gets the tensors of its input, whose structure is ``form``; None is one tensor.
    """

    form: Any = None

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self._parts = tuple(names)
        for name in names:
            parent: nn.Module = self
            *path, last = name.split(".")
            for step in path:
                if not hasattr(parent, step):
                    parent.add_module(step, nn.Module())
                parent = parent.get_submodule(step)
            parent.add_module(last, module.get_submodule(name))

    def forward(self, *leaves: Any) -> Any:
        value = leaves[0] if self.form is None else pytree.tree_unflatten(leaves, self.form)
        for name in self._parts:
            value = self.get_submodule(name)(value)
        return value


def tied(module: nn.Module, name: str) -> str:
    """The name of a parameter elsewhere that is tied to one of this module, or ""."""
    part = module.get_submodule(name)
    inside, parameters = {id(m) for m in part.modules()}, {id(p) for p in part.parameters()}
    others = ((n, m) for n, m in module.named_modules() if id(m) not in inside)
    every = ((f"{n}.{key}", p) for n, m in others for key, p in m._parameters.items())
    return next((key for key, p in every if id(p) in parameters), "")


def held(module: nn.Module, names: Iterable[str]) -> list[str]:
    """Those of the names that exist in this stage."""
    modules = dict(module.named_modules(remove_duplicate=False))
    return [name for name in names if name in modules]


def shard(module: nn.Module, names: Iterable[str], mesh: DeviceMesh) -> None:
    """Divide parameters over the ranks of a mesh (fully_shard): block by block, then the rest.

    Args:
        mesh: has one dimension, or two; along the first of two, parameters are replicated.

    Raises:
        JobFileError: fully_shard does not support the model.
    """
    parts = [module.get_submodule(name) for name in names if not tied(module, name)]
    try:
        for part in dict.fromkeys([*parts, module]):
            fully_shard(part, mesh=mesh)
    except (ValueError, NotImplementedError, AssertionError) as error:
        raise JobFileError(
            f"fsdp cannot divide the model: {error}",
            where="strategy",
            hint="use ddp or zero1, or change the model",
        ) from None


def recompute(module: nn.Module, names: Sequence[str]) -> None:
    """Recompute the activations inside of these blocks in the backward pass (Chen et al., 2016),
    with the same random numbers."""
    for name in names:
        block = module.get_submodule(name)
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def _named_tensors(module: nn.Module) -> list[tuple[str, Any]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _tensors(module: nn.Module) -> list[Any]:
    return [*module.parameters(), *module.buffers()]


def _size(module: nn.Module) -> int:
    """Trainable numbers in a module."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)
