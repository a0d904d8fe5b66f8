"""A person's own loop, whose newest step another rank saves when one is lost."""

import sys
from pathlib import Path

from sites import record_run

from hpcddp import spec
from hpcddp.rundir import RunDir

# With a schedule, an average of the weights, and data of its own.
LOOP = """
import random, sys, time
import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset
import hpcddp

DEVICE = torch.device("cpu")
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
random.seed(dist.get_rank())
numpy.random.seed(dist.get_rank())
data = TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(1)))
loader = DataLoader(data, batch_size=2, sampler=hpcddp.Sampler(data))
layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
layers.to(DEVICE)
model = DistributedDataParallel(layers)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
ema = AveragedModel(layers, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
run = hpcddp.attach(model, optimizer, scheduler=schedule, more=MORE, log_every=1)
for epoch in run.epochs(5):
    for (x,) in run.batches(loader):
        optimizer.zero_grad()
        try:
            model(x.to(DEVICE) + 0.1 * random.random()).square().mean().backward()
        except RuntimeError:
            if CATCHES:
                time.sleep(1000)
            raise
        optimizer.step()
        AFTER
        ema.update_parameters(layers)
        run.state["seen"] = [*run.state.get("seen", []), run.steps]
        run.step()
        time.sleep(0.02)
    schedule.step()
"""


def make_loop(
    folder: Path, *, more: str = "None", catches: bool = False, gpu: bool = False,
    after: str = "pass",
) -> RunDir:  # fmt: skip
    """A run of the script, for two ranks on each of two nodes, or one on each with a GPU.

    Args:
        more: the further object that it saves.
        catches: it catches the error of a collective, and waits.
        after: what it does behind the optimizer's step.
        gpu: all ranks train on the first GPU.
    """
    folder.mkdir()
    script, run = folder / "loop.py", RunDir(folder / "run")
    text = LOOP.replace("MORE", more).replace("CATCHES", str(catches)).replace("AFTER", after)
    if gpu:
        text = text.replace('"cpu"', '"cuda", 0').replace('"gloo"', '"nccl"')
    script.write_text(text)
    run.attempts.mkdir(parents=True)
    job = spec.to_dict(spec.KEYS.build({"command": [sys.executable, str(script)]}))
    return record_run(run, (2, 2), 1 if gpu else 2, "local", spec=job, workdir=str(folder))
