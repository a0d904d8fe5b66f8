"""The floor of `start` and `step`: a minimal DDP loop, written by hand.

python ddp_loop.py STAMPS STEPS BATCH WIDTH    BATCH: samples per rank and step

At the end rank 0 writes the time after each optimizer step to the file STAMPS. It trains the digits
task of hpcddp, so both sides have the same model, data and loss.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

# The top-level folder jobs is a part of the package.
digits: Any = import_module("hpcddp.jobs.digits")


def epochs(loader: DataLoader[Any], sampler: DistributedSampler[Any]) -> Iterator[Any]:
    for epoch in count():
        sampler.set_epoch(epoch)
        yield from loader


def main(stamps: str, steps: int, batch: int, width: int) -> None:
    rank = int(os.environ.get("SLURM_PROCID") or os.environ["RANK"])
    world = int(os.environ.get("SLURM_NTASKS") or os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = DistributedDataParallel(digits.model(width=width), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, fused=True)
    dataset = digits.dataset("train")
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, world, rank, drop_last=True)
    loader = DataLoader(dataset, batch_size=batch, sampler=sampler, drop_last=True)
    times = []
    for images, targets in islice(epochs(loader, sampler), steps):
        digits.loss(model(images), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.time())
    if rank == 0:
        Path(stamps).write_text(json.dumps(times))
    dist.barrier()  # a rank that ends early breaks the others' last collective
    os._exit(0)  # closing gloo's threads can abort or hang, and is not measured


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
