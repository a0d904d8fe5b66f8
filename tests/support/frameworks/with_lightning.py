"""A Lightning script as people bring them.

python with_lightning.py NODES DEVICES
"""

import sys

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main(nodes, devices):
    x = torch.randn(64, 8)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        strategy="ddp",
        num_nodes=int(nodes),
        devices=int(devices),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Net(), DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4))
    print("trained", trainer.global_rank, trainer.world_size, trainer.global_step, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
