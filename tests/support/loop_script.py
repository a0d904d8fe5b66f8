"""A DDP loop with dropout and augmentation, on its run by a few lines.

python loop_script.py EPOCHS PAUSE [plain|own|shuffle] [WORKERS]
"""

import random
import sys
import time

import preempted
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import hpcddp


class Noisy(Dataset):
    """Draws as the loader reads."""

    def __init__(self):
        self.x = torch.randn(103, 16, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        x = self.x[i] + 0.1 * torch.randn(16) + 0.1 * random.random()
        return x, (self.x[i].sum() > 0).float()[None]


def main(epochs, pause, kind="plain", workers=0):
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    random.seed(dist.get_rank())
    dataset = Noisy()
    how = {"shuffle": True}
    if kind != "shuffle":
        how = {"sampler": (hpcddp.Sampler if kind == "own" else DistributedSampler)(dataset)}
    loader = DataLoader(dataset, batch_size=4, num_workers=int(workers), **how)
    layers = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 1))
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.9)
    loss_of = nn.BCEWithLogitsLoss()

    run = hpcddp.attach(model, optimizer, scheduler=scheduler)
    for epoch in run.epochs(int(epochs)):
        for x, y in run.batches(loader):
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            run.step(loss)
            scheduler.step()
            time.sleep(float(pause))
            preempted.after(run)
        run.state["ended"] = [*run.state.get("ended", []), epoch]
    if run.world.is_main:
        print("over", run.steps, run.state["ended"], round(scheduler.get_last_lr()[0], 9))
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
