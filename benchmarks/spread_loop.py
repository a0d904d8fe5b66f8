"""One rank of `spread`: our training and a minimal loop of the same strategy in turn.

python spread_loop.py FIGURES STRATEGY WARM_UP RUN...    with torchrun's variables

Each RUN is one measurement of ours. A measurement of the loop follows it, or precedes it every
other time; with a single RUN there is none. Rank 0 writes the figures of each measurement to
FIGURES:

    step        seconds of a step after the warm-up, by rank 0's clock
    parameters  bytes of all live parameters after the last step, on the rank that has most
    optimizer   bytes of the optimizer state at that time
    sent        bytes that a process sent per step, the mean over all processes
"""

import gc
import json
import os
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from hpcddp import record, spec
from hpcddp.preempt import Preemption
from hpcddp.rundir import RunDir
from hpcddp.spec import JobSpec
from hpcddp.topology import Rank
from hpcddp.train.job import join, train_in
from hpcddp.train.rank import task_module as tasks
from hpcddp.train.rank.world import World

LR = 6e-3
LOSS: Any = None  # the loss function of the task
PLAN: dict[str, ParallelStyle] = {
    **dict.fromkeys(("attention.query", "attention.key", "attention.value"), ColwiseParallel()),
    "attention.out": RowwiseParallel(),
    "mlp.up": ColwiseParallel(),
    "mlp.down": RowwiseParallel(),
}
BYTES_SENT = 200  # offset in struct tcp_info (linux/tcp.h, since Linux 4.19)
Step = Callable[[Any, Any], object]


class Takes:
    """The figures of one side's measurements, taken after the optimizer's steps.

    Args:
        warm_up: steps that do not count.
        steps: all steps of a measurement.
        zero: the optimizer wraps another one.
    """

    def __init__(self, warm_up: int, steps: int, *, zero: bool) -> None:
        self.found: list[dict[str, float]] = []
        self._warm_up, self._steps, self._zero = warm_up, steps, zero
        self._taken = 0

    def look(self, optimizer: Optimizer, *given: Any) -> None:
        """Called after an optimizer's step; the step of a wrapped optimizer does not count."""
        if self._zero:
            if not isinstance(optimizer, ZeroRedundancyOptimizer):
                return
            optimizer = optimizer.optim
        self._taken += 1
        if self._taken == self._warm_up:
            self._sent, self._began = sent(), time.perf_counter()
        elif self._taken == self._steps:
            count = self._steps - self._warm_up
            took = (time.perf_counter() - self._began) / count
            self._taken = 0
            state = (t for each in optimizer.state.values() for t in each.values())
            self.found.append({
                "step": took,
                "parameters": _bytes(_live(nn.Parameter)),
                "optimizer": _bytes(t for t in state if isinstance(t, Tensor)),
                "sent": (sent() - self._sent) / count,
            })  # fmt: skip


def _live(kind: type[Any]) -> Iterator[Any]:
    return (found for found in gc.get_objects() if isinstance(found, kind))


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of these tensors on this rank; each storage counts once."""
    local = (t.to_local() if isinstance(t, DTensor) else t for t in tensors)
    storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in local)}
    return sum(storages.values())


def sent() -> int:
    """Bytes that this process has sent over its TCP connections (tcp(7), TCP_INFO)."""
    total = 0
    for file in list(Path("/proc/self/fd").iterdir()):
        try:
            if not stat.S_ISSOCK(file.stat().st_mode):
                continue
            with socket.socket(fileno=os.dup(int(file.name))) as s:
                facts = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:  # not a TCP socket, or closed meanwhile
            continue
        if len(facts) >= BYTES_SENT + 8:
            total += int.from_bytes(facts[BYTES_SENT : BYTES_SENT + 8], sys.byteorder)
    return total


def ddp(model: nn.Module) -> Step:
    return _plain(DistributedDataParallel(model, gradient_as_bucket_view=True), _adamw(model))


def zero1(model: nn.Module) -> Step:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return _plain(wrapped, ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=LR, fused=True))


def fsdp(model: nn.Module) -> Step:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name, part in model.named_children():
        if name.startswith("block"):
            fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _plain(model, _adamw(model))


def tp(model: nn.Module) -> Step:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name, part in model.named_children():
        if name.startswith("block"):
            parallelize_module(part, mesh, PLAN)
    return _plain(model, _adamw(model))


def pp(model: nn.Sequential) -> Step:
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = list(model)
    middle = len(parts) // 2
    stage = nn.Sequential(*(parts[:middle] if rank == 0 else parts[middle:]))
    schedule = Schedule1F1B(PipelineStage(stage, rank, size, torch.device("cpu")), size, LOSS)
    optimizer = _adamw(stage)

    def step(inputs: Any, targets: Any) -> None:
        schedule.step(inputs) if rank == 0 else schedule.step(target=targets)
        optimizer.step()
        optimizer.zero_grad()

    return step


LOOPS: dict[str, Callable[[Any], Step]] = {
    "ddp": ddp, "zero1": zero1, "fsdp": fsdp, "tp": tp, "pp": pp
}  # fmt: skip


def _adamw(model: nn.Module) -> Optimizer:
    """AdamW with one parameter group for each kind of tensor, as fused=True needs it."""
    kinds: dict[bool, list[Any]] = {}
    for parameter in model.parameters():
        kinds.setdefault(isinstance(parameter, DTensor), []).append(parameter)
    return AdamW([{"params": kind} for kind in kinds.values()], lr=LR, fused=True)


def _plain(model: nn.Module, optimizer: Optimizer) -> Step:
    def step(inputs: Any, targets: Any) -> None:
        LOSS(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(world: World, run: RunDir, asked: JobSpec, workdir: str) -> None:
    train_in(world, run, 1, asked, workdir, Preemption(), evaluates=False)


def floor(task: tasks.Task, strategy: str, asked: JobSpec) -> None:
    share = strategy in ("ddp", "zero1", "fsdp")  # otherwise all ranks train on the same samples
    count, rank = (dist.get_world_size(), dist.get_rank()) if share else (1, 0)
    size = asked.global_batch // count
    inputs, targets = (t[: len(t) // count * count][rank::count] for t in
                       task.dataset("train").tensors)  # fmt: skip
    step = LOOPS[strategy](task.model())
    for number in range(asked.max_steps):
        at = number * size % (len(inputs) - size)
        step(inputs[at : at + size], targets[at : at + size])


def main(figures: str, strategy: str, warm_up: str, *folders: str) -> None:
    global LOSS
    runs = [RunDir(folder) for folder in folders]
    job = record.read(runs[0])
    asked = spec.from_dict(job.spec)
    task = tasks.load(asked, job.workdir)
    LOSS = task.loss
    world = join(Rank.from_env(os.environ), job, os.environ)
    sides = {
        who: Takes(int(warm_up), asked.max_steps, zero=strategy == "zero1")
        for who in ("ours", "floor")
    }
    for number, run in enumerate(runs):
        order = ["ours", "floor"] if len(runs) > 1 else ["ours"]
        for who in order if number % 2 == 0 else reversed(order):
            hook = register_optimizer_step_post_hook(sides[who].look)
            world.barrier()
            ours(world, run, asked, job.workdir) if who == "ours" else floor(task, strategy, asked)
            hook.remove()
            gc.collect()  # free the memory of this measurement
    everyone = world.gather({who: takes.found for who, takes in sides.items()})
    if world.is_main:
        Path(figures).write_text(json.dumps({who: _all(everyone, who) for who in sides}))
    world.barrier()
    os._exit(0)  # closing gloo's threads can abort or hang, and is not measured


def _all(everyone: list[dict[str, list[dict[str, float]]]], who: str) -> list[dict[str, float]]:
    """Combine the ranks' figures of each measurement."""
    return [
        {
            "step": takes[0]["step"],
            "parameters": max(take["parameters"] for take in takes),
            "optimizer": max(take["optimizer"] for take in takes),
            "sent": sum(take["sent"] for take in takes) / len(takes),
        }
        for takes in zip(*(found[who] for found in everyone), strict=True)
    ]


if __name__ == "__main__":
    main(*sys.argv[1:])
