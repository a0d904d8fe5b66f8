"""What both loops share: a task's and a person's own are stopped, resumed and recorded alike."""

import json
import sys

import pytest
from local_runs import Command
from own_loops import runs
from sites import Site
from toy import TOY

from hpcddp.rundir import read_lines

# The ranks' first attempt is asked to stop in its fifth step; steps take their time.
STOP = """
import os, time
from hpcddp.rundir import RunDir, write_json
def stop(step):
    time.sleep(0.02)
    if step == 5 and os.environ["HPCDDP_ATTEMPT"] == "1":
        write_json(RunDir(os.environ["HPCDDP_RUN_DIR"]).request, {"want": "stop"})
"""
TASK = """
_loss, seen = loss, []
def loss(output, target):
    seen.append(1)
    stop(len(seen))
    return _loss(output, target)
"""
OWN = """
import torch
from torch.utils.data import DataLoader, TensorDataset
import hpcddp
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run = hpcddp.attach(model, optimizer, log_every=5, save_every=20)
loader = DataLoader(TensorDataset(torch.rand(480, 4)), batch_size=8)
for epoch in run.epochs(1):
    for (x,) in run.batches(loader):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        stop(run.steps + 1)
        run.step(loss)
"""
KEYS = ("--set", "global_batch=8", "--set", "max_steps=60", "--set", "train.log_every=5")
EVERY = ("--set", "checkpoint.every=20", "--set", "dataset.size=480")


@pytest.mark.parametrize("own", [False, True], ids=["task", "own loop"])
def test_stopped_and_resumed_it_leaves_the_same_records(
    site: Site, command: Command, own: bool
) -> None:
    site.job("toy", "", TOY + STOP + TASK)
    site.write("own.py", STOP + OWN)
    words = ("--", sys.executable, "own.py") if own else (*KEYS, *EVERY, "toy")
    done = command("submit", *words)
    assert json.loads(command("status", "last", "--json").out)["state"] == "STOPPED", done.text
    assert command("resume", "last").code == 0
    (run,) = runs(site)
    first, second = (list(read_lines(attempt.metrics)) for attempt in run.all_attempts())
    (end,) = (r for r in first if r["event"] == "end")
    stopped = end["step"]
    assert 5 <= stopped < 60 and end["outcome"] == "stopped"
    ends = [r for r in second if r["event"] in ("start", "end")]
    assert [(r["event"], r["step"]) for r in ends] == [("start", stopped), ("end", 60)]
    assert ends[0]["resumed"] == f"checkpoints/step-{stopped}" and ends[1]["outcome"] == "done"
    saved = [r["step"] for r in first + second if r["event"] == "checkpoint"]
    assert saved == sorted({stopped, 20, 40, 60}) and (end["saved"], ends[1]["saved"]) == (
        stopped,
        60,
    )
    rows = [r for r in first + second if r["event"] == "train"]
    steps = [r["step"] for r in rows]
    assert steps == sorted({*steps, 1, *range(5, 61, 5)})  # and each but once
    assert all({"loss", "lr", "step_s", "samples_per_s"} <= r.keys() for r in rows)
