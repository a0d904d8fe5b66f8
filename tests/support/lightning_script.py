"""A Lightning script with dropout, augmentation, validation, a schedule and callbacks, on its run.

python lightning_script.py EPOCHS KIND PAUSE

KIND is `plain`, or some of these: own (sampler), sparse (accumulation), stream (no length), manual
(three optimizers), workers, fails (after the fit, in the first attempt).
"""

import hashlib
import os
import sys
import time

import lightning
import preempted
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from loop_script import Noisy
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import hpcddp
from hpcddp.lightning import Preemptible


class Stream(IterableDataset):
    """The same without a length, and each rank's own."""

    def __iter__(self):
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        data = Noisy()
        return ((data.x[i], (data.x[i].sum() > 0).float()[None]) for i in range(rank, 100, size))


class Net(lightning.LightningModule):
    def __init__(self, pause, kind):
        super().__init__()
        self.save_hyperparameters()
        self.pause, self.kind, self.automatic_optimization = pause, kind, "manual" not in kind
        # DDP leaves each rank its own statistics where Lightning leaves the steps to the script.
        # And a batch of one sample, which other numbers of ranks may end with, has none.
        plain = "manual" in kind or "own" in kind
        norm = nn.LayerNorm(32) if plain else nn.BatchNorm1d(32)
        self.layers = nn.Sequential(
            nn.Linear(16, 32), norm, nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 1)
        )
        self.register_buffer("seen", torch.zeros(()))

    def train_dataloader(self):  # a sampler asks the process group, which is there by now
        return loader(self.kind)

    def loss(self, batch):
        return nn.functional.binary_cross_entropy_with_logits(self.layers(batch[0]), batch[1])

    def training_step(self, batch, index):
        print("took", self.global_rank, self.current_epoch, index, self.global_step, flush=True)
        loss = self.loss(batch)
        self.log("train", loss)
        if not self.automatic_optimization:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
        return loss

    def on_train_batch_end(self, *_):
        self.seen += 1  # after all callbacks' hooks: belongs to the step too
        time.sleep(self.pause)
        (callback,) = (c for c in self.trainer.callbacks if isinstance(c, Preemptible))
        if callback.run:
            preempted.after(callback.run)

    def validation_step(self, batch, index):
        self.log("val", self.loss(batch) + torch.rand(()), sync_dist=True)

    def configure_optimizers(self):
        if not self.automatic_optimization:
            return [torch.optim.Adam(part.parameters()) for part in self.layers if any(
                True for _ in part.parameters())]  # fmt: skip
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        step = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.9)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return [optimizer], [
            {"scheduler": step, "interval": "step"},
            {"scheduler": plateau, "monitor": "val"},
        ]


def loader(kind):
    if "stream" in kind:
        return DataLoader(Stream(), batch_size=4)
    data = Noisy()
    if "workers" in kind:  # these would draw by themselves
        data = TensorDataset(data.x, (data.x.sum(1) > 0).float()[:, None])
        return DataLoader(data, batch_size=4, shuffle=True, num_workers=2)
    sampler = hpcddp.Sampler(data) if "own" in kind else None
    return DataLoader(data, batch_size=4, shuffle=sampler is None, sampler=sampler)


def main(epochs, kind, pause):
    lightning.seed_everything(7, workers=True)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    nodes = int(os.environ.get("WORLD_SIZE", 1)) // ranks
    early = EarlyStopping("val", patience=100)
    trainer = lightning.Trainer(
        max_epochs=int(epochs),
        accelerator="cpu",
        devices=ranks,
        num_nodes=nodes,
        strategy="ddp" if ranks * nodes > 1 else "auto",
        logger=False,
        enable_progress_bar=False,
        val_check_interval=None if "stream" in kind else 5,
        accumulate_grad_batches=2 if "sparse" in kind else 1,
        callbacks=[Preemptible(), early, ModelCheckpoint(monitor="val")],
    )
    net = Net(float(pause), kind)
    trainer.fit(net, val_dataloaders=DataLoader(Noisy(), batch_size=16))
    if "fails" in kind and os.environ["HPCDDP_ATTEMPT"] == "1":
        raise RuntimeError("after the fit")
    weights = b"".join(t.cpu().numpy().tobytes() for t in net.state_dict().values())
    print(
        "over", trainer.global_step, trainer.current_epoch, int(net.seen), early.wait_count,
        float(early.best_score), hashlib.sha256(weights).hexdigest(), flush=True,
    )  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
