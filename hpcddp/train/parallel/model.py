"""Prepares the model for the loop: DDP, precision, loss scaling."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from hpcddp.spec import JobSpec
from hpcddp.train.parallel.hooks import Hook, check_dense
from hpcddp.train.rank.spread import Scaler, Spread

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def wrap(
    module: torch.nn.Module, spec: JobSpec, spread: Spread, hook: Hook | None = None
) -> torch.nn.Module:
    """The model in DistributedDataParallel, if there are replicas that fully_shard does not
    handle; the module itself stays plain.

    Args:
        hook: the communication hook; None for plain averages.

    Raises:
        JobFileError: on all ranks, if sparse gradients are not supported there.
    """
    layout, device = spread.layout, spread.world.device
    if layout.threads and device.type == "cuda":
        return torch.nn.DataParallel(module)
    if layout.ddp == 1 or spread.divided:
        return module
    model = DistributedDataParallel(
        module,
        device_ids=[device] if device.type == "cuda" else None,
        process_group=None if layout.pp == 1 else spread.group("ddp"),
        bucket_cap_mb=spec.ddp.bucket_mb or None,
        gradient_as_bucket_view=True,
        static_graph=spec.ddp.static_graph,
        find_unused_parameters=spec.ddp.find_unused_parameters,
    )
    settle_buckets(model)
    if spec.ddp.join:
        check_dense(module, "ddp.join")
    if hook:
        hook.register(model)
    return model


def settle_buckets(model: DistributedDataParallel) -> None:
    """Make DDP choose its buckets before the first step.

    DDP rebuilds its buckets after a process's first backward pass. The sum over four or more ranks
    depends on the buckets in its last bit, so the first step after a resume would differ from that
    of an undisturbed run. So a backward pass over the bare parameters comes first, in the same
    order in every attempt. It is not possible with a static graph, which DDP would learn from it,
    and with sparse gradients: there a resume differs in the last bit.
    """
    weights = [p for p in model.module.parameters() if p.requires_grad]
    if model.static_graph or model.find_unused_parameters:
        return
    if any(getattr(m, "sparse", False) for m in model.module.modules()):
        return
    model.reducer.prepare_for_backward([])
    _touched(model).backward()
    for p in weights:
        p.grad = None


def _touched(model: DistributedDataParallel) -> Tensor:
    """A number that depends on each parameter."""
    weights = [p for p in model.module.parameters() if p.requires_grad]
    return torch.stack([p.reshape(-1)[:1].sum().to(torch.float32) for p in weights]).sum()


def answer(model: DistributedDataParallel, scaler: Any) -> None:
    """Join the backward pass of a step in which this rank has no sample: it adds 0 to the averaged
    gradients, and receives them. A collective with the passes of the other ranks.

    torch's Join would not give them to this rank, so its optimizer would miss the step.
    """
    model._pre_forward(torch.zeros(()))
    nothing = model._post_forward(_touched(model) * 0)
    scaler.scale(nothing).backward()


def saved_buffers(modules: Iterable[torch.nn.Module]) -> list[Tensor]:
    """The buffers that go into a checkpoint, except DTensors."""
    buffers = []
    for module in modules:
        saved = module.state_dict(keep_vars=True)
        buffers += [buffer for name, buffer in module.named_buffers() if name in saved]
    return [buffer for buffer in buffers if not hasattr(buffer, "to_local")]


def share_buffers(model: DistributedDataParallel, *, again: bool = True) -> None:
    """Give all ranks rank 0's buffers, which are the saved ones; a collective.

    DDP does the same at the start of the next forward pass, so the training does not change.

    Args:
        again: it must, as the buffers may change until then.
    """
    if dist.get_world_size() > 1 and model.will_sync_module_buffers():
        model._sync_buffers()
        model.require_forward_param_sync = again


def autocast(
    device: torch.device, precision: str, *, divided: bool = False
) -> contextlib.AbstractContextManager[Any]:
    """The context of a forward pass.

    Args:
        divided: ranks gather parameters block by block. Then torch's cache of converted parameters
            is off: it would keep the whole model.
    """
    if precision not in DTYPES:
        return contextlib.nullcontext()
    return torch.autocast(device.type, DTYPES[precision], cache_enabled=not divided)


def grad_scaler(spread: Spread, spec: JobSpec) -> Scaler:
    """Loss scaling for fp16 (Micikevicius et al., 2018); disabled for other precisions."""
    enabled = spec.train.precision == "fp16"
    if enabled or spec.train.on_divergence != "stop":  # torch warns if the first step is skipped
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
    alike = spread.layout.plain and spec.ddp.hook != "local_sgd"
    return Scaler(spread.world.device.type, enabled=enabled, alike=alike)
