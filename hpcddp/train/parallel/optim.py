"""The optimizer and the learning rate: from the task, or AdamW with warm-up and cosine."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from hpcddp.errors import JobFileError
from hpcddp.spec import TrainSpec
from hpcddp.train.rank.task_module import Task


def make_optimizer(task: Task, model: nn.Module, train: TrainSpec) -> Optimizer:
    """The task's own optimizer, or AdamW (Loshchilov and Hutter, 2019)."""
    if task.has("optimizer"):
        own: Optimizer = task.optimizer(model)
        return own
    parameters = [p for p in model.parameters() if p.requires_grad]
    fused = all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in parameters)
    return torch.optim.AdamW(
        parameters, lr=train.lr, weight_decay=train.weight_decay, fused=fused or None
    )


GROUP = "group"  # in a param group: its index before the split


# Attributes of a schedule that have one value for each param group.
PER_GROUP = ("base_lrs", "max_lrs", "min_lrs", "_last_lr", "lr_lambdas", "base_momentums",
             "max_momentums")  # fmt: skip


def split_groups(optimizer: Optimizer, scheduler: Any) -> None:
    """Split groups whose parameters lie on different meshes: torch's fast optimizers support only
    one mesh at a time. Adapt the schedule, which was made before."""
    groups: list[dict[str, Any]] = []
    for i, group in enumerate(optimizer.param_groups):
        kinds: dict[Any, list[Any]] = {}
        for parameter in group["params"]:
            kinds.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
        groups += [{**group, "params": params, GROUP: i} for params in kinds.values()]
    if len(groups) > len(optimizer.param_groups):
        optimizer.param_groups[:] = groups
        _split_schedule(scheduler, groups)


def _split_schedule(scheduler: Any, groups: Sequence[dict[str, Any]]) -> None:
    for inner in getattr(scheduler, "_schedulers", []):
        _split_schedule(inner, groups)
    kept = {name: getattr(scheduler, name, None) for name in PER_GROUP}
    for name, values in by_new_groups(kept, groups).items():
        if values is not None:
            setattr(scheduler, name, values)


def by_new_groups(state: dict[str, Any], groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A schedule's state for the groups after a split."""
    before = [group.get(GROUP, i) for i, group in enumerate(groups)]
    regrouped: dict[str, Any] = _per_group(state, before, max(before) + 1)
    return regrouped


def by_old_groups(state: dict[str, Any], groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A schedule's state for the groups before a split."""
    before = [group.get(GROUP, i) for i, group in enumerate(groups)]
    firsts = [before.index(number) for number in sorted(set(before))]
    regrouped: dict[str, Any] = _per_group(state, firsts, len(groups))
    return regrouped


def _per_group(state: Any, which: Sequence[int], count: int) -> Any:
    """The state with each list of ``count`` groups' values replaced by the values at ``which``."""
    if isinstance(state, list):
        return [_per_group(item, which, count) for item in state]
    if type(state) is not dict:
        return state
    return {
        name: [item[i] for i in which]
        if name in PER_GROUP and isinstance(item, list) and len(item) == count
        else _per_group(item, which, count)
        for name, item in state.items()
    }


def divided(optimizer: Optimizer, group: dist.ProcessGroup) -> Optimizer:
    """An optimizer whose state is divided over the ranks of a group (Rajbhandari et al., 2020,
    stage 1): each rank updates some of the parameters and sends them to the others.

    Raises:
        JobFileError: the optimizer cannot be built for another list of parameters.
    """
    from torch.distributed.optim import ZeroRedundancyOptimizer

    kind = type(optimizer)
    takes = inspect.signature(kind).parameters  # AdamW's defaults have more entries than parameters
    defaults = {name: value for name, value in optimizer.defaults.items() if name in takes}
    try:
        return ZeroRedundancyOptimizer(
            [dict(params) for params in optimizer.param_groups],
            kind,
            process_group=group,
            **defaults,
        )
    except (TypeError, ValueError) as error:
        raise JobFileError(
            f"zero1 cannot divide a {kind.__name__}: {error}",
            where="optimizer()",
            hint="use an optimizer of torch.optim, or fsdp, which divides any optimizer's state",
        ) from None


def own(optimizer: Optimizer) -> Optimizer:
    """The optimizer of this rank's parameters inside of a ZeroRedundancyOptimizer."""
    inner: Optimizer = getattr(optimizer, "optim", optimizer)
    return inner if isinstance(inner, Optimizer) else optimizer


def make_scheduler(
    task: Task, optimizer: Optimizer, train: TrainSpec, total_steps: int
) -> LRScheduler:
    """The schedule, stepped after every optimizer step."""
    if task.has("scheduler"):
        own: LRScheduler = task.scheduler(optimizer, total_steps)
        return own
    return LambdaLR(optimizer, shape(train, total_steps))


def shape(train: TrainSpec, total_steps: int) -> Callable[[int], float]:
    """The factor on the peak learning rate after a number of steps.

    Linear warm-up, then constant or a half cosine to 0 (Loshchilov and Hutter, 2017).
    """
    warmup = train.warmup_steps

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if train.schedule == "constant":
            return 1.0
        done = (step - warmup) / max(1, total_steps - warmup)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    return factor


def go_to_step(scheduler: LambdaLR, step: int) -> None:
    """Set hpcddp's own schedule, a function of the step alone, to a step. The current job file
    applies to the next steps."""
    scheduler.last_epoch = step
    for group, base, factor in zip(
        scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
    ):
        group["lr"] = base * factor(step)
    scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]
