"""The layers that tp divides, and how: the task's ``tp_plan``, or pairs of linear layers."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from hpcddp.errors import JobFileError
from hpcddp.train.parallel.cut import held, known, members, tied
from hpcddp.train.rank.task_module import Task

STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
# These change each number on its own, so a divided row stays divided.
ELEMENTWISE = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.Dropout,
               nn.Identity)  # fmt: skip


def tp_plan(task: Task, module: nn.Module, ranks: int) -> dict[str, ParallelStyle]:
    """The layers to divide over ``ranks`` ranks, and how: the task's plan, or ``pairs``.

    Raises:
        JobFileError: there is nothing to divide, or the plan names a missing layer.
    """
    plan = task.cut("tp_plan", module)
    plan = pairs(module) if plan is None else plan
    if not plan:
        raise JobFileError(
            "tp finds no layers to divide",
            where=task.name,
            hint='define tp_plan(model) -> {name of a layer: "colwise" or "rowwise"}',
        )
    names = known(plan, module, task, "tp_plan")
    styles = {name: _style(plan[name], name, task) for name in names}
    for name in names:
        _divisible(module.get_submodule(name), plan[name], name, ranks, task)
        if twin := tied(module, name):
            raise JobFileError(
                f"tp cannot divide {name}: {twin} is the same parameter",
                where=task.name,
                hint="remove it from tp_plan(), or use separate parameters",
            )
    return styles


def share_layers(module: nn.Module, plan: dict[str, ParallelStyle], mesh: DeviceMesh) -> None:
    """Divide the layers of a plan that are in this stage."""
    for name in held(module, plan):
        parallelize_module(module.get_submodule(name), mesh, plan[name])


def _style(style: Any, name: str, task: Task) -> ParallelStyle:
    if isinstance(style, ParallelStyle):
        return style
    if style not in STYLES:
        raise JobFileError(
            f"tp_plan() has an unknown style for {name}: {style!r}",
            where=task.name,
            hint=f"use {' or '.join(STYLES)}, or a ParallelStyle of torch",
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
                hint=f"use a size divisible by {count}",
            )


def pairs(module: nn.Module) -> dict[str, str]:
    """A plan for pairs of linear layers with only elementwise functions between them: the first
    divided by its outputs, the second by its inputs (Shoeybi et al., 2019)."""
    plan: dict[str, str] = {}
    for prefix, part in module.named_modules():
        if not isinstance(part, nn.Sequential):
            continue
        first = ""
        inside = members(part)
        for name, child in inside:
            path = f"{prefix}.{name}" if prefix else name
            once = sum(other is child for _, other in inside) == 1 and not tied(module, path)
            if isinstance(child, nn.Linear) and once:
                if first:
                    plan |= {first: "colwise", path: "rowwise"}
                first = "" if first else path
            elif not isinstance(child, ELEMENTWISE):
                first = ""
    return plan
