"""A transformers Trainer with dropout, augmentation, evaluation and callbacks, on its run.

python transformers_script.py EPOCHS KIND PAUSE

KIND is `plain`, or some of these: sparse (accumulation), workers, fails (after the training, in the
first attempt), saves (its own, of which it keeps one), gpt (one of the library's own models).
"""

import hashlib
import os
import random
import sys
import time
from pathlib import Path

import preempted
import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hpcddp.transformers import Preemptible


class Samples(Dataset):
    """103 of them; `noisy` ones draw as they are read."""

    def __init__(self, noisy):
        self.x = torch.randn(103, 16, generator=torch.Generator().manual_seed(1))
        self.noisy = noisy

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        x = self.x[i] + (0.1 * torch.randn(16) + 0.1 * random.random() if self.noisy else 0)
        return {"x": x, "labels": (self.x[i].sum() > 0).float()[None], "index": i}


class Words(Samples):
    def __getitem__(self, i):
        words = (10 * self.x[i]).long() % 32
        return {"input_ids": words, "labels": words, "index": i}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x, labels=None, index=None):
        out = self.layers(x)
        loss = nn.functional.binary_cross_entropy_with_logits(out, labels)
        took(self, index, loss)
        return {"loss": loss, "logits": out}


class Gpt(GPT2LMHeadModel):
    """A PreTrainedModel: its first and last layer have the same weights."""

    def __init__(self, config=None):
        small = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2)
        super().__init__(config or small)

    def forward(self, input_ids=None, labels=None, index=None, **given):
        out = super().forward(input_ids, labels=labels, **given)
        took(self, index, out.loss)
        return out


def took(model, index, loss):
    if model.training:
        print("took", os.environ.get("RANK"), index.tolist(), repr(loss.item()), flush=True)


class Pause(TrainerCallback):
    """Takes its time, and has the run preempted."""

    def __init__(self, pause):
        self.pause = pause

    def on_step_end(self, args, state, control, **_):
        time.sleep(self.pause)
        (callback,) = (c for c in TRAINERS[0].callback_handler.callbacks
                       if isinstance(c, Preemptible))  # fmt: skip
        if callback.run:
            preempted.after(callback.run)


TRAINERS = []


def main(epochs, kind, pause):
    torch.manual_seed(3)  # the Trainer seeds after the model is made
    if "saves" in kind:
        Path("out/checkpoint-99").mkdir(parents=True, exist_ok=True)  # as a killed save leaves it
    args = TrainingArguments(
        output_dir="out",
        num_train_epochs=float(epochs),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2 if "sparse" in kind else 1,
        dataloader_num_workers=2 if "workers" in kind else 0,
        use_cpu=True,
        learning_rate=0.01,
        logging_steps=7,
        eval_strategy="epoch" if "sparse" in kind else "steps",
        eval_steps=5,
        save_strategy="steps" if "saves" in kind else "no",
        save_steps=3,
        save_total_limit=1,
        metric_for_best_model="loss",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        seed=7,
    )
    data = Words if "gpt" in kind else Samples
    early = EarlyStoppingCallback(100)
    trainer = Trainer(
        model=Gpt() if "gpt" in kind else Net(),
        args=args,
        train_dataset=data("workers" not in kind),
        eval_dataset=data(True),
        callbacks=[Preemptible(save_every=100), early, Pause(float(pause))],
    )
    TRAINERS.append(trainer)
    result = trainer.train()
    if "fails" in kind and os.environ["HPCDDP_ATTEMPT"] == "1":
        raise RuntimeError("after the training")
    weights = b"".join(t.cpu().numpy().tobytes() for t in trainer.model.state_dict().values())
    timed = ("runtime", "per_second", "steps_per")
    # What is read back from a checkpoint has its keys in another order.
    history = [{k: v for k, v in sorted(logs.items()) if not any(t in k for t in timed)}
               for logs in trainer.state.log_history]  # fmt: skip
    print(
        "over", trainer.state.global_step, trainer.state.epoch, result.training_loss,
        early.early_stopping_patience_counter, history, hashlib.sha256(weights).hexdigest(),
        flush=True,
    )  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
