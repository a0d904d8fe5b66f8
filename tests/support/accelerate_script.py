"""An Accelerate script with dropout, accumulation and a schedule, on its run by the lines with ###.

python accelerate_script.py EPOCHS PAUSE
"""

import sys
import time

import preempted
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hpcddp  ###


def main(epochs, pause):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(7)
    x = torch.randn(206, 16)
    loader = DataLoader(TensorDataset(x, (x.sum(1) > 0).float()[:, None]), 4, shuffle=True)
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.9)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    set_seed(7 + accelerator.process_index)

    run = hpcddp.attach(model, optimizer, scheduler=scheduler, scaler=accelerator.scaler)  ###
    for epoch in run.epochs(int(epochs)):  ###
        for x, y in run.batches(loader):  ###
            with accelerator.accumulate(model):
                loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            print("took", accelerator.process_index, epoch, float(x.sum()), flush=True)
            time.sleep(float(pause))
            if accelerator.sync_gradients:  ###
                run.step(loss)  ###
                preempted.after(run)
    print("over", run.steps, round(scheduler.get_last_lr()[0], 9), flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
