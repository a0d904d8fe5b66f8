"""Models spread over the real Slurm's ranks: preempted under each strategy, and going on under
the next one."""

import json
import random
from pathlib import Path

import pytest
from PIL import Image
from ranks import records

from hpcddp import strategy
from hpcddp.attempt import ledger
from hpcddp.planning import resources
from hpcddp.rundir import RunDir, read_lines

from .desk import Desk

JOBS = resources.folder("jobs")
# The shipped GPT, small, in float64 and with samples that take their time.
TASK = f"""
import sys, time
sys.path.insert(0, {str(JOBS)!r})
import charlm
from charlm import blocks, loss, metrics, tp_plan

def model():
    return charlm.model(layers=4, width=16, heads=4, context=16)

class Slow:
    def __init__(self, inner, pause):
        self.inner, self.pause = inner, pause
    def __len__(self):
        return 1000
    def __getitem__(self, i):
        time.sleep(self.pause)
        return self.inner[i]

def dataset(split, pause=0.0):
    return Slow(charlm.dataset("train", 16), pause) if split == "train" else None
"""
JOB = """
task = "gpt.py"
global_batch = 8
max_steps = {steps}
[train]
precision = "fp64"
clip_norm = 1.0
log_every = 1
[checkpoint]
every = 0
"""
PAUSE = ("--set", "dataset.pause=0.02")
# Nodes, GPUs of each, and how the model lies on them.
FEW = (("2", "1", "fsdp"), ("2", "1", "pp=2"))
ALL = (("2", "1", "ddp"), ("2", "2", "fsdp"), ("2", "2", "pp=2,ddp=2"))


def losses(run: RunDir) -> dict[int, float]:
    """Of every step; those that were taken twice came out the same."""
    found: dict[int, float] = {}
    for attempt in ledger.attempts(run):
        for line in read_lines(run.attempt(attempt.number).metrics):
            if line["event"] == "train":
                assert found.setdefault(line["step"], line["loss"]) == line["loss"]
    return found


@pytest.mark.parametrize("lives", [FEW, pytest.param(ALL, marks=pytest.mark.full)], ids=len)
def test_a_run_is_preempted_under_each_strategy_and_goes_on_under_the_next(
    desk: Desk, lives: tuple[tuple[str, str, str], ...]
) -> None:
    steps = 45 * len(lives)
    (desk.folder / "jobs/gpt.py").write_text(TASK)
    (desk.folder / "jobs/gpt.toml").write_text(JOB.format(steps=steps))
    run = ""
    for i, (nodes, gpus, text) in enumerate(lives):
        words = ("resume", run) if run else ("submit", "gpt")
        how = ("--nodes", nodes, "--gpus", gpus, "--strategy", text, "--detach", "--json")
        run = json.loads(desk(*words, *how, *PAUSE).splitlines()[0])["run"]
        desk.training(run, attempt=2 * i + 1, step=45 * i + 5)
        desk.take_all_nodes()
        if i + 1 < len(lives):
            desk.training(run, attempt=2 * i + 2, step=45 * i + 15)
            desk("stop", run)
            desk.until(lambda s: s["state"] == "STOPPED", run)
    desk.until(lambda s: s["state"] == "COMPLETED", run)
    lived = ledger.attempts(desk.run(run))
    causes = ["preempted", "stopped"] * len(lives)
    assert [a.cause for a in lived] == [*causes[:-1], "done"]
    begun = [records(desk.run(run), "start", a.number)[0] for a in lived]
    layouts = [str(strategy.layout(text, int(n), int(g))) for n, g, text in lives for _ in "12"]
    assert [row["strategy"] for row in begun] == layouts
    saved = [records(desk.run(run), "end", a.number)[0]["step"] for a in lived[:-1]]
    assert [row["step"] for row in begun] == [0, *saved]  # nothing is lost
    desk("submit", "gpt", "--cluster", "local", "--nodes", "1", "--gpus", "1", "--strategy=single")
    alone = losses(desk.run())
    assert list(alone) == list(range(1, steps + 1))
    assert losses(desk.run(run)) == pytest.approx(alone, rel=1e-9)


@pytest.mark.full
@pytest.mark.parametrize("text", ["fsdp=2,tp=2", "pp=4", "ddp"])
def test_the_gpt_trains_is_preempted_and_finishes(desk: Desk, text: str) -> None:
    size = ("--nodes", "2", "--gpus", "2", "--strategy", text)
    words = ("submit", "charlm", *size, "--detach", "--json", "--set", "max_steps=150")
    run = json.loads(desk(*words).splitlines()[0])["run"]
    desk.training(run, step=20)
    desk.take_all_nodes()
    desk.until(lambda s: s["state"] == "COMPLETED", run)
    assert [a.cause for a in ledger.attempts(desk.run(run))] == ["preempted", "done"]
    (end,) = records(desk.run(run), "eval", 2)[-1:]
    assert end["metrics"]["loss"] < 2.4  # what one character before tells is 2.3


@pytest.mark.full
def test_a_resnet_trains_on_a_folder_of_images_is_preempted_and_finishes(desk: Desk) -> None:
    pictures(desk.folder / "pictures")
    keys = ("dataset.root=pictures", "dataset.size=32", "epochs=12", "data.workers=1")
    words = [word for key in keys for word in ("--set", key)]
    out = desk("submit", "resnet", "--nodes", "2", "--gpus", "2", *words, "--detach", "--json")
    run = json.loads(out.splitlines()[0])["run"]
    desk.training(run, step=4)
    desk.take_all_nodes()
    desk.until(lambda s: s["state"] == "COMPLETED", run)
    assert [a.cause for a in ledger.attempts(desk.run(run))] == ["preempted", "done"]
    (end,) = records(desk.run(run), "eval", 2)[-1:]
    assert end["metrics"]["accuracy"] > 0.8


def pictures(folder: Path) -> None:
    """Two classes that differ in their colour."""
    drawn = random.Random(0)
    for split, count in (("train", 40), ("val", 12)):
        for name, strong in (("blue", 2), ("red", 0)):
            (folder / split / name).mkdir(parents=True)
            for i in range(count):
                colour = [drawn.randrange(90) for _ in range(3)]
                colour[strong] += 150
                Image.new("RGB", (40, 40), tuple(colour)).save(folder / split / name / f"{i}.png")
