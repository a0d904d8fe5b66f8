"""A transformers Trainer on its run: it comes back where it was, and ends as if undisturbed."""

import hashlib
import inspect
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
from local_runs import Command, until
from own_loops import both, runs, said, start, used
from sites import SUPPORT, Site

from hpcddp.attempt import ledger
from hpcddp.errors import UserError
from hpcddp.sandbox import compare

SCRIPT = str(SUPPORT / "transformers_script.py")


@pytest.mark.parametrize(
    ("kind", "steps", "at"),
    [
        # An epoch is 7 steps of two batches, the last one of one; an evaluation follows it.
        ("sparse", 21, (9,)),
        pytest.param("sparse", 21, (6, 9, 16), marks=pytest.mark.full),
        pytest.param("plain-saves", 39, (10, 15), marks=pytest.mark.full),
        pytest.param("workers", 39, (2, 14), marks=pytest.mark.full),
        pytest.param("gpt-sparse", 21, (9,), marks=pytest.mark.full),
    ],
)
def test_preempted_it_loses_no_step_and_ends_as_if_undisturbed(
    site: Site, command: Command, kind: str, steps: int, at: tuple[int, ...]
) -> None:
    reference, run = both(site, command, SCRIPT, "3", kind, at=at)
    assert compare.difference(reference, run, 2) == ""
    assert said(run, "over") == said(reference, "over")
    assert {line.split()[1] for line in said(run, "over")} == {str(steps)}
    newest = run.checkpoints / f"step-{steps}"
    state = json.loads((newest / "trainer_state.json").read_text())
    assert state["global_step"] == steps and (newest / "model.safetensors").is_file()
    assert command("export", run.name, "weights.safetensors").code == 0


def test_from_pretrained_reads_the_checkpoints_of_a_model_with_tied_weights(
    site: Site, command: Command
) -> None:
    from transformers import GPT2LMHeadModel

    start(command, "1", "gpt-sparse", "0", size=("--gpus", "1"), script=SCRIPT, at=(4,))
    until(command, lambda s: s["state"] == "COMPLETED")
    (run,) = runs(site)
    assert [a.cause for a in ledger.attempts(run)] == ["preempted", "done"]
    assert len(said(run, "took")) == 26 and {line.split()[1] for line in said(run, "over")} == {
        "13"
    }
    model = GPT2LMHeadModel.from_pretrained(run.checkpoints / "step-13")
    assert model.config.n_embd == 16 and model.lm_head.weight is model.transformer.wte.weight
    weights = b"".join(t.numpy().tobytes() for t in model.state_dict().values())
    assert [x for x in said(run, "over") if hashlib.sha256(weights).hexdigest() in x]
    assert command("export", run.name, "weights.safetensors").code == 0
    assert safetensors.torch.load_file("weights.safetensors").keys() <= model.state_dict().keys()


def test_a_training_that_is_over_is_not_done_again(site: Site, command: Command) -> None:
    """What follows it failed."""
    start(command, "1", "fails", "0", script=SCRIPT, size=("--gpus", "1"))
    until(command, lambda s: s["state"] == "COMPLETED")
    (run,) = runs(site)
    assert [a.cause for a in ledger.attempts(run)] == ["crash", "done"]
    assert len(said(run, "took")) == 26 and set(said(run, "took").values()) == {1}
    assert {line.split()[1] for line in said(run, "over")} == {"26"}


@pytest.mark.full
@pytest.mark.parametrize(("kind", "before", "after"), [("plain", 1, 3), ("sparse", 4, 2)])
def test_it_goes_on_with_another_number_of_ranks(
    site: Site, command: Command, kind: str, before: int, after: int
) -> None:
    start(command, "2", kind, "0.2", size=("--gpus", str(before)), script=SCRIPT, stop="1")
    stopped = until(command, lambda s: s["state"] == "STOPPED")["step"]
    assert command("resume", "last", "--gpus", str(after), "--detach").code == 0
    until(command, lambda s: s["state"] == "COMPLETED")
    (run,) = runs(site)
    # 103 samples in 26 batches. A rank has its part of them, and two a step where they add up.
    each, part = 2 if kind == "sparse" else 1, -(-26 // after)
    begun = stopped * each * before // after // each * each
    steps = stopped - (-(part - begun) // each) - (-part // each)
    assert {line.split()[1] for line in said(run, "over")} == {str(steps)}
    trained = used(run)
    assert sorted(trained) == [*range(103)] and min(trained.values()) == 2
    assert trained.total() == 4 * (stopped * each * before + (2 * part - begun) * after)


def test_outside_of_a_job_it_changes_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "1", "plain", "0"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "over 26" in done.stdout
    assert not [path for path in tmp_path.iterdir() if path.name != "out"]


MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        return {"loss": self.layer(x).square().mean()}
"""

TWICE = """
from transformers import Trainer, TrainingArguments
from hpcddp.transformers import Preemptible

args = TrainingArguments(
    "out", max_steps=3, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True
)
data = [{"x": torch.ones(4)}] * 80
trainer = Trainer(Net(), args, train_dataset=data, callbacks=[Preemptible(save_every=2)])
trainer.train()
trainer.train()
"""


def test_a_second_training_is_refused(site: Site, command: Command) -> None:
    site.write("twice.py", MODEL + TWICE)
    done = command("submit", "--set", "requeue.crashes=1", "--", sys.executable, "twice.py")
    assert done.code == 1
    assert "saved checkpoints/step-2" in done.text and "one call of Trainer.train" in done.text


ALONE = """
import os, subprocess, sys, time
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

class Preempt(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        print("step", state.global_step, flush=True)
        if state.global_step == 5 and os.environ["HPCDDP_ATTEMPT"] == "1":
            run = os.environ["HPCDDP_RUN_DIR"]
            subprocess.run([sys.executable, "-m", "hpcddp", "preempt", run], check=True)
            time.sleep(600)

args = TrainingArguments(
    "out", max_steps=8, use_cpu=True, report_to=[], save_strategy="steps", save_steps=3,
    disable_tqdm=True
)
trainer = Trainer(Net(), args, train_dataset=[{"x": torch.ones(4)}] * 80, callbacks=[Preempt()])
last = get_last_checkpoint("out") if os.path.isdir("out") else None
print("resumes from", last, flush=True)
trainer.train(resume_from_checkpoint=last)
"""


@pytest.mark.full
def test_without_the_callback_a_script_that_resumes_comes_back_from_its_last_save(
    site: Site, command: Command
) -> None:
    site.write("alone.py", MODEL + ALONE)
    done = command("submit", "--no-snapshot", "--follow", "--", sys.executable, "alone.py")
    assert done.code == 0, done.text
    (run,) = runs(site)
    assert [a.cause for a in ledger.attempts(run)] == ["preempted", "done"]
    assert said(run, "resumes").keys() == {"resumes from None", "resumes from out/checkpoint-3"}
    steps = said(run, "step")
    assert [*steps] == [f"step {step}" for step in range(1, 9)]
    assert [step for step, count in steps.items() if count == 2] == ["step 4", "step 5"]


def trainer(**given: Any) -> Any:
    """What the checks look at, with something changed; dots lead into the arguments."""
    from hpcddp.transformers.unsupported import NEEDED

    options = ("ignore_data_skip", "auto_find_batch_size", "enable_jit_checkpoint")
    args = SimpleNamespace(**dict.fromkeys(options, False))
    args.accelerator_config = SimpleNamespace(dispatch_batches=None)
    made = SimpleNamespace(
        **dict.fromkeys(NEEDED), args=args, train_dataset=[1], hp_search_backend=None,
        is_deepspeed_enabled=False, is_fsdp_enabled=False, is_fsdp_xla_enabled=False,
        accelerator=SimpleNamespace(parallelism_config=None),
    )  # fmt: skip
    for name, value in given.items():
        setattr(args if name in options else made, name, value)
    return made


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"is_deepspeed_enabled": True}, "DeepSpeed"),
        ({"is_fsdp_enabled": True}, "FSDP"),
        ({"accelerator": SimpleNamespace(parallelism_config=1)}, "divided over the ranks"),
        ({"train_dataset": iter([1])}, "dataset without a length"),
        ({"ignore_data_skip": True}, "ignore_data_skip"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"enable_jit_checkpoint": True}, "enable_jit_checkpoint"),
        ({"hp_search_backend": "optuna"}, "search for hyperparameters"),
    ],
)
def test_what_cannot_be_resumed_exactly_is_refused(given: dict[str, Any], said: str) -> None:
    from hpcddp.transformers.unsupported import refuse

    with pytest.raises(UserError, match=f"does not support .*{said}") as caught:
        refuse(trainer(**given))
    assert caught.value.hint and caught.value.where


def test_a_trainer_of_another_make_is_refused_at_the_start() -> None:
    from hpcddp.transformers.unsupported import refuse

    other = trainer()
    del other._run_epoch
    with pytest.raises(UserError, match="has no _run_epoch") as caught:
        refuse(other)
    assert "5.23" in caught.value.hint
    refuse(trainer())


def test_the_trainer_has_what_the_callback_replaces() -> None:
    from transformers import Trainer

    from hpcddp.transformers.unsupported import NEEDED

    assert [name for name in NEEDED if not hasattr(Trainer, name)] == []
    epoch = inspect.signature(Trainer._run_epoch).parameters
    assert {"epoch", "start_time", "resume_from_checkpoint", "epochs_trained",
            "steps_trained_in_current_epoch"} <= epoch.keys()  # fmt: skip
    batches = list(inspect.signature(Trainer.get_batch_samples).parameters)
    assert batches == ["self", "epoch_iterator", "num_batches", "device"]
    assert list(inspect.signature(Trainer._finalize_training).parameters)[-1] == "start_time"
