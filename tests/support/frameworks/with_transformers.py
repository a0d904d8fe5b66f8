"""A script with the transformers Trainer as people bring them."""

import torch
from torch import nn
from transformers import Trainer, TrainingArguments


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x, labels=None):
        out = self.layer(x)
        return {"loss": nn.functional.mse_loss(out, labels), "logits": out}


def main():
    data = [{"x": torch.rand(8), "labels": torch.ones(1)} for _ in range(64)]
    args = TrainingArguments(
        output_dir="out",
        num_train_epochs=1,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(model=Net(), args=args, train_dataset=data)
    trainer.train()
    print("trained", args.process_index, args.world_size, trainer.state.global_step, flush=True)


if __name__ == "__main__":
    main()
