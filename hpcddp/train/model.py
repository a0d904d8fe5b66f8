"""The model as the loop runs it: under DDP, in its precision, with its loss scaling."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hpcddp.spec import JobSpec, TrainSpec
from hpcddp.train.spread import Scaler, Spread

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def wrap(module: torch.nn.Module, spec: JobSpec, spread: Spread) -> torch.nn.Module:
    """The model with its gradients averaged over replicas, if there are any that fully_shard does
    not look after; the module itself stays plain."""
    layout, device = spread.layout, spread.world.device
    if layout.threads and device.type == "cuda":
        return torch.nn.DataParallel(module)
    if layout.ddp == 1 or spread.divided:
        return module
    model = DistributedDataParallel(
        module,
        device_ids=[device] if device.type == "cuda" else None,
        process_group=None if layout.pp == 1 else spread.group("ddp"),
        bucket_cap_mb=spec.ddp.bucket_mb,
        gradient_as_bucket_view=True,
        static_graph=spec.ddp.static_graph,
        find_unused_parameters=spec.ddp.find_unused_parameters,
    )
    settle_buckets(model)
    return model


def settle_buckets(model: DistributedDataParallel) -> None:
    """Let DDP lay its buckets out before the first step.

    It lays them out anew after a process's first backward pass. The sum over four or more ranks
    depends on the layout in its last bit, so the first step after a resume would not be the one
    that the uninterrupted run took. A backward pass over the bare parameters comes first instead,
    in the same order in every life. A static graph would take it for the one to learn, and sparse
    gradients have another form: with these a resume differs in the last bit.
    """
    weights = [p for p in model.module.parameters() if p.requires_grad]
    if model.static_graph or model.find_unused_parameters:
        return
    if any(getattr(m, "sparse", False) for m in model.module.modules()):
        return
    model.reducer.prepare_for_backward([])
    torch.stack([p.reshape(-1)[:1].sum().to(torch.float32) for p in weights]).sum().backward()
    for p in weights:
        p.grad = None


def share_buffers(model: DistributedDataParallel) -> None:
    """Give all ranks rank 0's buffers, which are those that are saved; a collective.

    DDP does so at the start of the next forward pass, so the training does not see it.
    """
    if dist.get_world_size() > 1 and model.will_sync_module_buffers():
        model._sync_buffers()


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager[Any]:
    """What a forward pass runs in."""
    if precision not in DTYPES:
        return contextlib.nullcontext()
    return torch.autocast(device.type, DTYPES[precision])


def grad_scaler(spread: Spread, train: TrainSpec) -> Scaler:
    """Loss scaling for fp16 (Micikevicius et al., 2018); for the rest it passes things through."""
    enabled = train.precision == "fp16"
    if enabled or train.on_divergence != "stop":  # a first step left out is remarked on
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
    return Scaler(spread.world.device.type, enabled=enabled, alike=spread.layout.plain)
