"""Steps, beside the same training written out by hand in float64."""

import math
import sys

import pytest
import torch
from ranks import Ranks, make_run, one_rank, records

from hpcddp.errors import JobFileError
from hpcddp.spec import TrainSpec
from hpcddp.train.checkpoint import checkpoint, dcp_files
from hpcddp.train.input.sampler import ResumableSampler
from hpcddp.train.parallel import optim


def by_hand(task, batches, *, seed=0, lr=1e-3, clip=0.0):
    """Train on lists of sample numbers; the weights and each step's loss."""
    torch.manual_seed(seed)
    model, losses = task.model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    inputs, targets = task.dataset("train").tensors
    for batch in batches:
        optimizer.zero_grad()
        loss = task.loss(model(inputs[batch]), targets[batch])
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def batches_of(size, batch, epochs, *, drop_last):
    """The sample numbers of each step, over all ranks."""
    batches = []
    for epoch in range(epochs):
        sampler = ResumableSampler(range(size), 1, 0)
        sampler.set_epoch(epoch)
        order = list(sampler)
        stop = size - size % batch if drop_last else size
        batches += [order[i : i + batch] for i in range(0, stop, batch)]
    return batches


def assert_same(run, model, losses):
    """The run's losses and last weights are those of the training by hand."""
    ours = [r["loss"] for r in records(run, "train")]
    torch.testing.assert_close(ours, losses, rtol=1e-6, atol=0)  # summed in float32
    saved = dcp_files.read_all(checkpoint.complete(run.checkpoints)[0], "model.")
    for name, value in model.state_dict().items():
        torch.testing.assert_close(saved[f"model.{name}"], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("micro", [0, 2, 1])
@pytest.mark.parametrize("static", [False, True])
def test_accumulated_micro_batches_are_one_big_batch(tmp_path, micro, static):
    run = make_run(tmp_path, epochs=2, max_steps=0, train__micro_batch=micro,
                   train__schedule="constant", ddp__static_graph=static)  # fmt: skip
    one_rank(run)
    batches = batches_of(37, 4, 2, drop_last=True)
    assert_same(run, *by_hand(sys.modules["small_task"], batches))
    (start,) = records(run, "start")
    assert (start["steps_per_epoch"], start["total_steps"]) == (9, 18)
    assert start["accumulation"] == (1 if micro == 0 else 4 // micro)


def test_an_incomplete_last_batch_is_a_mean_over_its_samples(tmp_path):
    """37 samples, 8 a step, micro-batches of 2: the last step has 5, in 2 + 2 + 1."""
    run = make_run(tmp_path, global_batch=8, epochs=2, max_steps=0, train__drop_last=False,
                   train__micro_batch=2, train__schedule="constant")  # fmt: skip
    one_rank(run)
    batches = batches_of(37, 8, 2, drop_last=False)
    assert [len(b) for b in batches] == [8, 8, 8, 8, 5] * 2
    assert_same(run, *by_hand(sys.modules["small_task"], batches))


def test_ranks_together_are_one_process_and_padding_counts_nowhere(tmp_path):
    """2 ranks, 37 samples, 6 a step: the last step has 1 sample, so rank 1 has padding only. Of
    7 held-out samples one rank has 4 and the other 3."""
    job = {"global_batch": 6, "epochs": 2, "max_steps": 0, "train__micro_batch": 2}
    job |= {"train__drop_last": False, "train__schedule": "constant", "train__clip_norm": 0.5}
    alone, run = make_run(tmp_path / "1", **job), make_run(tmp_path / "2", gpus=2, **job)
    with Ranks.of(run, 2) as ranks:
        assert [code for code, _, _ in ranks.wait()] == [0, 0]
    one_rank(alone)
    batches = batches_of(37, 6, 2, drop_last=False)
    assert len(batches[6]) == 1
    model, losses = by_hand(sys.modules["small_task"], batches, clip=0.5)
    assert_same(run, model, losses)
    assert_same(alone, model, losses)
    one, two = (records(r, "eval")[-1] for r in (alone, run))
    assert one["count"] == two["count"] == 7 and one["counted"] == two["counted"]
    assert one["metrics"]["loss"] == pytest.approx(two["metrics"]["loss"], rel=1e-12)
    inputs, targets = sys.modules["small_task"].dataset("eval").tensors
    correct = (model(inputs).argmax(1) == targets).sum().item()
    assert two["counted"] == {"accuracy": correct}
    assert two["metrics"]["accuracy"] == correct / 7


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_trains_and_resumes(tmp_path, precision):
    run = make_run(tmp_path, train__precision=precision, train__clip_norm=1.0)
    source = tmp_path / "small_task.py"
    text = source.read_text().replace(".double()", "").replace("torch.float64", "torch.float32")
    source.write_text(text)
    for attempt in (1, 2):
        one_rank(run, attempt, max_steps=3 * attempt)
    trained = records(run, "train") + records(run, "train", 2)
    assert [r["step"] for r in trained] == [1, 2, 3, 4, 5, 6]
    assert all(math.isfinite(r["loss"]) and r["grad_norm"] > 0 for r in trained[1:])


OWN = """
def optimizer(model, train):
    return torch.optim.SGD(model.parameters(), lr=train.lr, momentum=0.9)
def scheduler(optimizer, total_steps):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=total_steps)
"""


def test_a_tasks_own_optimizer_and_schedule_go_on_after_a_resume(tmp_path):
    job = {"extra": OWN, "max_steps": 12, "checkpoint__every": 5, "checkpoint__keep": 9}
    run = make_run(tmp_path, **job)
    one_rank(run)
    whole = dcp_files.read_all(run.checkpoints / "step-12")
    for name in ("step-12", "step-10", "step-9"):
        (run.checkpoints / name / "COMPLETE").unlink()
    one_rank(run, 2)
    rates = [{r["step"]: r["lr"] for r in records(run, "train", n)} for n in (1, 2)]
    assert len(set(rates[0].values())) > 8
    assert rates[1] == {step: lr for step, lr in rates[0].items() if step > 5}
    again = dcp_files.read_all(run.checkpoints / "step-12")
    assert "optim.0.weight.momentum_buffer" in whole
    assert all(torch.equal(whole[name], again[name]) for name in whole)


SCHEDULES = {
    "milestones": "MultiStepLR(optimizer, [2, 4, 8], 0.5)",
    "one after the other": "SequentialLR(optimizer, [LinearLR(optimizer, 0.1, total_iters=3), "
    "MultiStepLR(optimizer, [5, 6], 0.5)], [3])",
    "exponential": "ExponentialLR(optimizer, 0.9)",
    "one cycle": "OneCycleLR(optimizer, max_lr=0.1, total_steps=total_steps)",
}


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # SequentialLR's own
@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_tasks_own_schedule_goes_on_after_a_resume(tmp_path, kind):
    """Also over the optimizer that is not the task's own."""
    extra = (
        "\nfrom torch.optim.lr_scheduler import *\n"
        f"def scheduler(optimizer, total_steps):\n    return {SCHEDULES[kind]}\n"
    )
    run = make_run(tmp_path, extra=extra, max_steps=9, checkpoint__every=3, checkpoint__keep=9)
    one_rank(run)
    for name in ("step-9", "step-6"):
        (run.checkpoints / name / "COMPLETE").unlink()
    one_rank(run, 2)
    rates = [{r["step"]: r["lr"] for r in records(run, "train", n)} for n in (1, 2)]
    assert len(set(rates[0].values())) > 2
    assert rates[1] == {step: lr for step, lr in rates[0].items() if step > 3}


def test_a_parameter_without_a_gradient_does_not_stop_a_resume(tmp_path):
    unused = (
        "\n_model = model\n"
        "def model():\n"
        "    m = _model()\n"
        "    m.register_parameter('unused', nn.Parameter(torch.zeros(3, dtype=torch.float64)))\n"
        "    return m\n"
    )
    run = make_run(tmp_path, extra=unused, ddp__find_unused_parameters=True)
    one_rank(run, max_steps=3)
    one_rank(run, 2)
    assert records(run, "start", 2)[0]["step"] == 3
    names = dcp_files.shapes(run.checkpoints / "step-6")
    assert "model.unused" in names and "optim.0.weight.exp_avg" in names


def test_a_finished_run_that_is_resumed_says_its_result_again(tmp_path, capsys):
    run = make_run(tmp_path)
    one_rank(run)
    first = capsys.readouterr().out.splitlines()[-2:]
    assert one_rank(run, 2) == "done"
    assert capsys.readouterr().out.splitlines()[-2:] == first
    assert records(run, "train", 2) == [] and first[0].startswith("accuracy")


def test_epochs_and_max_steps_whichever_comes_first(tmp_path):
    for name, job, steps in [
        ("one epoch", {"epochs": 0, "max_steps": 0}, 9),
        ("steps", {"epochs": 2, "max_steps": 5}, 5),
        ("epochs", {"epochs": 2, "max_steps": 99}, 18),
    ]:
        run = make_run(tmp_path / name, dataset__held_out=0, checkpoint__every=0, **job)
        one_rank(run)
        assert records(run, "end")[0]["step"] == steps
        assert [p.name for p in checkpoint.complete(run.checkpoints)] == [f"step-{steps}"]
        assert records(run, "eval") == []  # no held-out samples, no evaluation


def test_the_schedule_warms_up_and_ends_at_zero():
    factor = optim.shape(TrainSpec(warmup_steps=4), total_steps=24)
    assert [round(factor(step), 6) for step in range(5)] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert factor(14) == pytest.approx(0.5) and factor(24) == pytest.approx(0)
    assert optim.shape(TrainSpec(schedule="constant"), 24)(23) == 1


BAD_METRICS = {
    "a mean": "{'accuracy': (output.argmax(1) == target).float().mean()}",
    "the name of the loss": "{'loss': output.argmax(1) == target}",
    "another length": "{'accuracy': output.flatten() > 0, 'other': target > 0}",
}


@pytest.mark.parametrize("kind", BAD_METRICS)
def test_metrics_that_are_not_per_sample_are_refused(tmp_path, kind):
    extra = f"\ndef metrics(output, target):\n    return {BAD_METRICS[kind]}\n"
    with pytest.raises(JobFileError, match="one value per sample"):
        one_rank(make_run(tmp_path, extra=extra, max_steps=1))
