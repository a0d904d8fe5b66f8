"""An Accelerate script as people bring them."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(cpu=True)
    x = torch.randn(64, 8)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps = 0
    for a, b in loader:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.mse_loss(model(a), b))
        optimizer.step()
        steps += 1
    print("trained", accelerator.process_index, accelerator.num_processes, steps, flush=True)


if __name__ == "__main__":
    main()
