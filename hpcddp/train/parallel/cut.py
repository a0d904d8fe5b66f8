"""How a model is cut: into blocks for fsdp, stages for pp, and layers shared by tp.

A task's own word comes first (task.CUTS); else the model's structure says it, where it can.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from hpcddp.errors import JobFileError
from hpcddp.train.rank.task_module import Task

STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
# What changes each number by itself keeps a row of them divided as it is.
ELEMENTWISE = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.Dropout,
               nn.Identity)  # fmt: skip


def blocks(task: Task, module: nn.Module) -> list[str]:
    """Names of the model's repeated parts: the task's, or the members of the largest list of
    modules. None if there is no such list."""
    own = task.cut("blocks", module)
    if own is not None:
        names = _known(own, module, task, "blocks")
        for name in names:
            if not _has_forward(module.get_submodule(name)):
                raise JobFileError(
                    f"blocks() names {name}, which is never called: it has no forward",
                    where=task.name,
                    hint="name the modules in it",
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
    """Names of a group's members; a list among them is not called itself, but its members are."""
    found: list[str] = []
    for name, part in group.named_children():
        here = f"{path}.{name}" if path else name
        found += [here] if _has_forward(part) else _called(part, here)
    return found


def _has_forward(part: nn.Module) -> bool:
    return type(part).forward is not nn.Module.forward


def parts(task: Task, module: nn.Module) -> list[str]:
    """Names of modules that called one after the other are the model.

    Raises:
        JobFileError: neither the task nor the model's structure says it; or they are not all.
    """
    own = task.cut("parts", module)
    if own is None and not isinstance(module, nn.Sequential):
        raise JobFileError(
            f"pp cannot cut a {type(module).__name__}: nothing says what follows what in it",
            where=task.name,
            hint="give an nn.Sequential, or define parts(model): names of modules that called one "
            "after the other are the model",
        )
    names = [n for n, _ in members(module)]
    names = names if own is None else _known(own, module, task, "parts")
    inside = {id(p) for name in names for p in _tensors(module.get_submodule(name))}
    for name, tensor in _named_tensors(module):
        if id(tensor) not in inside:
            raise JobFileError(
                f"{name} is in none of the model's parts",
                where=task.name,
                hint="parts(model) names modules that hold everything between them",
            )
    return names


def members(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """A module's own modules; named_children leaves out the second use of one."""
    return [(name, part) for name, part in module._modules.items() if part is not None]


def _known(names: Any, module: nn.Module, task: Task, function: str) -> list[str]:
    known = dict(module.named_modules(remove_duplicate=False))
    for name in names:
        if name not in known:
            raise JobFileError(
                f"{function}() names {name!r}, which the model has not",
                where=task.name,
                hint="names are those of model.named_modules()",
            )
    return list(names)


def stages(task: Task, module: nn.Module, count: int) -> list[list[str]]:
    """The parts of each of so many stages, of about equal size.

    Raises:
        JobFileError: there are fewer parts with parameters than stages, or one stands in two.
    """
    names = parts(task, module)
    sizes = [_size(module.get_submodule(name)) for name in names]
    full = sum(size > 0 for size in sizes)
    if full < count:
        raise JobFileError(
            f"pp cannot make {count} stages of {full} parts: {', '.join(names)}",
            where=task.name,
            hint="take fewer stages, or cut the model into smaller parts",
        )
    found = [[names[i] for i in piece] for piece in divide(sizes, count)]
    owner: dict[int, int] = {}
    for stage, members in enumerate(found):
        for name in members:
            for tensor in _tensors(module.get_submodule(name)):
                if owner.setdefault(id(tensor), stage) != stage:
                    raise JobFileError(
                        f"a parameter of {name} is shared with another stage of the pipeline",
                        where=task.name,
                        hint="let each stage have its own, or take fsdp",
                    )
    return found


def divide(sizes: Sequence[int], count: int) -> list[range]:
    """Neighbours into so many groups, each with something in it, the largest as small as can be;
    of two such divisions the one whose first groups are larger."""

    @functools.cache
    def best(begin: int, groups: int) -> tuple[int, int]:
        """The largest group's size from here on, and where the first one ends."""
        if groups == 1:
            return sum(sizes[begin:]) or _NEVER, len(sizes)
        found = (_NEVER, begin)
        for end in range(begin + 1, len(sizes)):
            if size := sum(sizes[begin:end]):
                found = min(found, (max(size, best(end, groups - 1)[0]), -end))
        return found[0], -found[1]

    ends = [0]
    for groups in range(count, 0, -1):
        ends.append(best(ends[-1], groups)[1])
    return [range(a, b) for a, b in itertools.pairwise(ends)]


_NEVER = 1 << 62


class Chain(nn.Module):
    """Some parts of a model under their own names, called one after the other.

    Args of a call: the tensors of its input, which is of the form ``form``; None is one tensor.
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


def tp_plan(task: Task, module: nn.Module, ranks: int) -> dict[str, ParallelStyle]:
    """How layers are divided over so many ranks: the task's plan, or ``pairs``.

    Raises:
        JobFileError: there is nothing to divide, or the plan names what is not there.
    """
    plan = task.cut("tp_plan", module)
    plan = pairs(module) if plan is None else plan
    if not plan:
        raise JobFileError(
            "tp finds no layers to divide",
            where=task.name,
            hint='define tp_plan(model) -> {name of a layer: "colwise" or "rowwise"}',
        )
    names = _known(plan, module, task, "tp_plan")
    styles = {name: _style(plan[name], name, task) for name in names}
    for name in names:
        _divisible(module.get_submodule(name), plan[name], name, ranks, task)
        if tied := _tied(module, name):
            raise JobFileError(
                f"tp cannot divide {name}: {tied} is the same parameter",
                where=task.name,
                hint="leave it out of tp_plan(), or let each have its own",
            )
    return styles


def _tied(module: nn.Module, name: str) -> str:
    """A parameter of another module that is also one of this one; "" if there is none."""
    part = module.get_submodule(name)
    inside, mine = {id(m) for m in part.modules()}, {id(p) for p in part.parameters()}
    others = ((n, m) for n, m in module.named_modules() if id(m) not in inside)
    every = ((f"{n}.{key}", p) for n, m in others for key, p in m._parameters.items())
    return next((key for key, p in every if id(p) in mine), "")


def share_layers(module: nn.Module, plan: dict[str, ParallelStyle], mesh: DeviceMesh) -> None:
    """Divide the layers that a stage has of a plan."""
    for name in held(module, plan):
        parallelize_module(module.get_submodule(name), mesh, plan[name])


def held(module: nn.Module, names: Iterable[str]) -> list[str]:
    """Those of the whole model's modules that a stage has."""
    known = dict(module.named_modules(remove_duplicate=False))
    return [name for name in names if name in known]


def _style(style: Any, name: str, task: Task) -> ParallelStyle:
    if isinstance(style, ParallelStyle):
        return style
    if style not in STYLES:
        raise JobFileError(
            f"tp_plan() says {style!r} for {name}",
            where=task.name,
            hint=f"say {' or '.join(STYLES)}, or give a ParallelStyle of torch's",
        )
    return STYLES[style]()


def _divisible(part: nn.Module, style: Any, name: str, count: int, task: Task) -> None:
    if isinstance(part, nn.Linear) and isinstance(style, str):
        size = part.out_features if style == "colwise" else part.in_features
        if size % count:
            raise JobFileError(
                f"tp cannot divide {name} over {count} ranks: it has {size} "
                f"{'outputs' if style == 'colwise' else 'inputs'}",
                where=task.name,
                hint=f"take a size that {count} divides",
            )


def pairs(module: nn.Module) -> dict[str, str]:
    """A plan for two linear layers with nothing but functions of each number between them: the
    first by its outputs, the second by its inputs (Shoeybi et al., 2019)."""
    plan: dict[str, str] = {}
    for prefix, part in module.named_modules():
        if not isinstance(part, nn.Sequential):
            continue
        first = ""
        inside = members(part)
        for name, child in inside:
            path = f"{prefix}.{name}" if prefix else name
            once = sum(other is child for _, other in inside) == 1 and not _tied(module, path)
            if isinstance(child, nn.Linear) and once:
                if first:
                    plan |= {first: "colwise", path: "rowwise"}
                first = "" if first else path
            elif not isinstance(child, ELEMENTWISE):
                first = ""
    return plan


def shard(module: nn.Module, names: Iterable[str], mesh: DeviceMesh) -> None:
    """Divide parameters over the ranks of a mesh (fully_shard): block by block, then the rest.

    Args:
        mesh: of one dimension, or of two, along the first of which parameters are copied.

    Raises:
        JobFileError: fully_shard does not take the model.
    """
    parts = [module.get_submodule(name) for name in names if not _tied(module, name)]
    try:
        for part in dict.fromkeys([*parts, module]):
            fully_shard(part, mesh=mesh)
    except (ValueError, NotImplementedError, AssertionError) as error:
        raise JobFileError(
            f"fsdp cannot divide the model: {error}",
            where="strategy",
            hint="take ddp or zero1, or change the model",
        ) from None


def recompute(module: nn.Module, names: Sequence[str]) -> None:
    """Keep no activations inside of these blocks, but compute them again in the backward pass
    (Chen et al., 2016). Random numbers are drawn the same."""
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
