"""The options and numbers of an optimizer's state, for checkpoints and for memory trials.

state_dict.py names its tensors, with those of the model. ``begin`` makes the tensors that a restore
fills; ``apply`` sets the numbers from meta.json.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpcddp.train.parallel.optim import GROUP, own
from hpcddp.train.parallel.state_dict import naming


def groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The optimizer's options by parameter group, as plain data."""
    options = {
        group.get(GROUP, i): {k: _plain(v) for k, v in group.items() if k not in ("params", GROUP)}
        for i, group in enumerate(optimizer.param_groups)
    }
    return list(options.values())


@torch.no_grad()
def begin(module: nn.Module, optimizer: Optimizer, names: set[str]) -> None:
    """Make exactly the optimizer state of which a checkpoint has tensors.

    A step with a learning rate and gradients of 0 creates the state, which is overwritten next.

    Args:
        names: the names of the checkpoint's tensors.
    """
    inner, name_of = own(optimizer), naming(module)
    saved = {name.removeprefix("optim.").rpartition(".")[0] for name in names if "optim." in name}
    stepped = {id(p) for group in inner.param_groups for p in group["params"]}
    lacking = [
        p
        for name, p in module.named_parameters()
        if id(p) in stepped and name_of(name) in saved and not inner.state.get(p)
    ]
    if lacking:
        _step_nowhere(inner, lacking)
    for name, p in module.named_parameters():
        state = inner.state.get(p, {})
        for key in [k for k, value in state.items() if isinstance(value, Tensor)]:
            if f"optim.{name_of(name)}.{key}" not in names:
                del state[key]
        if p in inner.state and not state:
            del inner.state[p]


@contextlib.contextmanager
def reserved(optimizer: Optimizer) -> Iterator[None]:
    """Within, the optimizer has the full state that it has after a step; afterwards, its earlier
    state."""
    inner = own(optimizer)
    options = [{k: v for k, v in g.items() if k != "params"} for g in inner.param_groups]
    trainable = [p for group in inner.param_groups for p in group["params"] if p.requires_grad]
    lacking = [p for p in trainable if not inner.state.get(p)]
    try:
        if lacking:
            _step_nowhere(inner, lacking)
        yield
    finally:
        for p in lacking:
            inner.state.pop(p, None)
        for group, before in zip(inner.param_groups, options, strict=True):
            group.update(before)


def _step_nowhere(optimizer: Optimizer, parameters: list[nn.Parameter]) -> None:
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    gradients, rates = [p.grad for p in stepped], [g["lr"] for g in optimizer.param_groups]
    for p in stepped:
        p.grad = None
    for p in parameters:
        p.grad = torch.zeros_like(p)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for p, gradient in zip(stepped, gradients, strict=True):
        p.grad = gradient


def apply(
    module: nn.Module, optimizer: Optimizer, meta: Mapping[str, Any], *, options: bool
) -> None:
    """Set the numbers of an optimizer whose tensors were read.

    Args:
        meta: the saved results of ``groups`` and ``Parts.plain``.
        options: restore the optimizer's options too; otherwise those of the job file apply.
    """
    inner, name_of = own(optimizer), naming(module)
    stepped = {id(p) for group in inner.param_groups for p in group["params"]}
    for name, p in module.named_parameters():
        if id(p) in stepped and (values := meta["state"].get(name_of(name))):
            inner.state[p].update(values)
    saved = meta["param_groups"]
    if options and len(saved) == len(groups(optimizer)):
        for i, group in enumerate(optimizer.param_groups):
            live = {k: v for k, v in group.items() if k != "params"}
            group.update(like(saved[group.get(GROUP, i)], live))


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value


def like(value: Any, live: Any) -> Any:
    """A value from JSON, converted to the types of the live one, at any depth: JSON has no tensors,
    tuples or Counters, and only strings as keys."""
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
    restored = copy.copy(live)
    restored.clear()
    for name, item in value.items():
        key = keys[name] if name in keys else kind(name)
        restored[key] = like(item, live.get(key))
    return restored
