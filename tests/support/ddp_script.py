"""A training script as people bring them: DDP from the environment, and nothing of hpcddp.

python ddp_script.py OUT [STEPS]
"""

import hashlib
import json
import os
import socket
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def digest(module):
    """SHA-256 of the weights."""
    found = hashlib.sha256()
    for value in module.state_dict().values():
        found.update(value.numpy().tobytes())
    return found.hexdigest()


def main(out, steps=20):
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    local = int(os.environ["LOCAL_RANK"])
    print(f"rank {rank} of {size}, local rank {local} on {socket.gethostname()}", flush=True)

    torch.manual_seed(0)
    inputs = torch.randn(256, 16)
    targets = (inputs.sum(1, keepdim=True) > 0).float()
    dataset = TensorDataset(inputs, targets)
    sampler = DistributedSampler(dataset, seed=1)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_of = nn.BCEWithLogitsLoss()

    step = epoch = 0
    while step < int(steps):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            step += 1
            if step == int(steps):
                break
        epoch += 1

    places = [None] * size
    dist.all_gather_object(places, [rank, local, int(os.environ["GROUP_RANK"])])
    if rank == 0:
        with open(out, "w") as file:
            json.dump(
                {"weights": digest(model.module), "places": places, "loss": loss.item()}, file
            )
    dist.barrier()
    del model  # it holds the group, whose threads must not outlive Python
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
