"""A person's own loop on a run: it comes back where it was, and ends as if nothing had happened."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from local_runs import Command, until
from own_loops import SCRIPT, SIZE, runs, said, start
from sites import Site, record_run

from hpcddp.attempt import ledger
from hpcddp.observe import history
from hpcddp.rundir import RunDir, read_lines
from hpcddp.sandbox import compare
from hpcddp.topology import Rank


def preempt_at(command: Command, *steps: int) -> None:
    for attempt, step in enumerate(steps, 1):
        until(command, lambda s, a=attempt, n=step: s["attempt"] == a and s["step"] >= n)  # type: ignore[misc]
        assert command("preempt", "last").code == 0
        until(command, lambda s, a=attempt: s["attempt"] > a)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        pytest.param("plain", "0", marks=pytest.mark.full),
        pytest.param("own", "0", marks=pytest.mark.full),
        pytest.param("own", "2", marks=pytest.mark.full),
        ("shuffle", "0"),
    ],
)
def test_preempted_it_loses_no_step_and_ends_as_if_undisturbed(
    site: Site, command: Command, kind: str, workers: str
) -> None:
    start(command, "4", "0", kind, workers)
    until(command, lambda s: s["state"] == "COMPLETED")
    start(command, "4", "0.1", kind, workers, at=(1, 20))
    until(command, lambda s: s["state"] == "COMPLETED")
    reference, run = runs(site)
    assert [a.cause for a in ledger.attempts(run)] == ["preempted", "preempted", "done"]
    assert sum(row.lost for row in history.summaries(run)) == sum(compare.lost(run).values()) == 0
    if workers == "0":  # processes draw by themselves: see hpcddp.Sampler
        assert compare.difference(reference, run, 2) == ""
        assert compare.digest(run) == compare.digest(reference) != ""
    over = [x for x in command("logs").out.splitlines() if "over" in x]
    steps, rate = (104, 0.0034867844) if kind == "shuffle" else (52, 0.0059049)
    assert over == [f"0: over {steps} [0, 1, 2, 3] {round(rate, 9)}"]


def test_it_goes_on_with_more_ranks(site: Site, command: Command) -> None:
    start(command, "2", "0.1", "own", size=("--gpus", "1"), stop="2")
    until(command, lambda s: s["state"] == "STOPPED")
    assert command("resume", "last", "--gpus", "3", "--follow").code == 0
    (run,) = runs(site)
    before = compare.traces(run)[1][-1]["step"]
    lines = list(read_lines(run.attempt(2).metrics))
    (begun,) = [x["step"] for x in lines if x["event"] == "start"]
    # 103 samples: 4 a step on one rank, then 12 a step on three, in each of two epochs.
    epoch, inside = divmod(before, 26)
    rest = -(-(103 - 4 * inside) // 12) + 9 * (1 - epoch)
    assert begun == before
    assert [x["step"] for x in lines if x["event"] == "end"] == [before + rest]


@pytest.mark.parametrize("told", [{}, {"RANK": "0", "WORLD_SIZE": "1"}])
def test_outside_of_a_job_it_is_a_plain_loop(tmp_path: Path, told: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(Path(SCRIPT).parent)!r})\n"
         "import loop_script as s; import torch.distributed as d\n"
         "d.init_process_group = lambda *a, o=d.init_process_group: "
         "o('gloo', store=d.HashStore(), rank=0, world_size=1)\n"
         "s.main(1, 0)"],
        cwd=tmp_path, env={**os.environ, **told}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "over 26 [0]" in done.stdout and "checkpoints and stop requests are off" in done.stderr
    assert not list(tmp_path.iterdir())


def test_ranks_that_are_not_the_planned_ones_leave_a_record_of_who_it_was(tmp_path: Path) -> None:
    """As where a node has lost its GPU: the decision on what follows reads it."""
    run = RunDir(tmp_path / "run")
    run.attempt(1).path.mkdir(parents=True)
    record_run(run, (2, 2), 2)
    environ = {**os.environ, "HPCDDP_RUN_DIR": str(run.path), **Rank(0, 1, 0, 1, 0).to_env()}
    code = "import hpcddp; hpcddp.init()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "RankMapError" in done.stderr
    error = json.loads(run.attempt(1).error.read_text())
    assert (error["rank"], error["type"], error["kind"]) == (0, "RankMapError", "crash")
    assert "does not fit" in error["message"] and error["host"]


def test_where_no_other_rank_could_save_its_step_the_generators_are_left_alone(
    tmp_path: Path,
) -> None:
    run = RunDir(tmp_path / "run")
    run.attempt(1).path.mkdir(parents=True)
    record_run(run, (1, 1), 1, "local")
    environ = {**os.environ, "HPCDDP_RUN_DIR": str(run.path), **Rank(0, 1, 0, 1, 0).to_env()}
    code = (
        "import random, torch, hpcddp; seed, model = random.seed, torch.nn.Linear(2, 1)\n"
        "run = hpcddp.attach(model, torch.optim.SGD(model.parameters(), 0.1))\n"
        "print(random.seed == seed)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["True"], done.stderr


MANY = """
import sys, torch
import hpcddp
model = torch.nn.Linear(2, 1)
run = hpcddp.attach(model, torch.optim.SGD(model.parameters(), 0.1), leave=False, save_every=0)
print("state", run.resumed, run.state)
run.state["seen"] = run.steps
while run.steps < 100000:
    if run.step():
        sys.exit(0)
    if run.resumed:
        break
run.finish()
"""


def test_a_program_that_leaves_by_itself_comes_back_whatever_its_exit_code(
    site: Site, command: Command
) -> None:
    site.write("many.py", MANY.replace("while", "import time\nwhile").replace(
        "    if run.res", "    time.sleep(0.01)\n    if run.res"))  # fmt: skip
    command("submit", "--detach", "--", sys.executable, "many.py")
    preempt_at(command, 1)
    until(command, lambda s: s["state"] == "COMPLETED")
    (run,) = runs(site)
    ends = [(a.cause, a.exit_code) for a in ledger.attempts(run)]
    assert ends == [("preempted", 0), ("done", 0)]
    told = [x for x in command("logs", "last").out.splitlines() if "state" in x]
    assert told == ["0: state False {}", "0: state True {'seen': 0}"]


WIDE = """
import os, torch, hpcddp
model = torch.nn.Linear(2, int(os.environ.get("WIDTH", "1")))
run = hpcddp.attach(model, torch.optim.SGD(model.parameters(), 0.1))
while run.steps < 3:
    run.step()
run.finish()
"""


def test_a_resume_of_another_model_leaves_a_programs_run_as_it_was(
    site: Site, command: Command
) -> None:
    """Its model is not known before the job."""
    site.write("wide.py", WIDE)
    assert command("submit", "--", sys.executable, "wide.py").code == 0
    done = command("resume", "last", "--env", "WIDTH=5")
    assert (
        done.code == 1 and "model.bias is [1] in the checkpoint and [5] in the model" in done.text
    )
    found = until(command, lambda s: s["attempt"] == 2)
    assert (found["state"], found["step"], found["refused"]) == ("COMPLETED", 3, True)
    (run,) = runs(site)
    assert "WIDTH" not in run.job.read_text()  # the next resume goes by what was asked before


LOG = """
import torch, hpcddp
model = torch.nn.Linear(2, 1)
run = hpcddp.attach(model, torch.optim.SGD(model.parameters(), 0.1))
run.step()
run.log(accuracy=torch.tensor(0.5), count=3)
try:
    run.log(accuracy=torch.zeros(2))
except Exception as error:
    print("refused", error)
"""


def test_numbers_of_a_loops_own_are_recorded(site: Site, command: Command) -> None:
    site.write("log.py", LOG)
    assert command("submit", "--", sys.executable, "log.py").code == 0
    (run,) = runs(site)
    (line,) = [x for x in read_lines(run.attempt(1).metrics) if x["event"] == "log"]
    assert (line["step"], line["metrics"]) == (1, {"accuracy": 0.5, "count": 3.0})
    told = command("logs").out
    assert "step 1  epoch 0  accuracy 0.5000  count 3.0000" in told
    assert "refused Run.log: accuracy is a Tensor, expected one number" in told
    done = subprocess.run([sys.executable, "log.py"], cwd=site.folder, check=False)
    assert done.returncode == 0  # outside of a job


FIGURES = """
import time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
import hpcddp

class Model(torch.nn.Linear):
    def forward(self, x):
        time.sleep(0.03 * dist.get_rank())
        return super().forward(x)

class Late(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        time.sleep(0.06)
        return torch.ones(4)

hpcddp.init()
model = DistributedDataParallel(Model(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run = hpcddp.attach(model, optimizer, log_every=1)
for epoch in run.epochs(1):
    for x in run.batches(DataLoader(Late())):
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        run.step(loss)
del model
dist.destroy_process_group()
"""


def test_its_ranks_figures_are_told_too(site: Site, command: Command) -> None:
    """Its second rank is slow, and both wait for what they read by themselves."""
    site.write("figures.py", FIGURES)
    done = command("submit", *SIZE, "--", sys.executable, "figures.py")
    assert done.code == 0, done.text
    (run,) = runs(site)
    lines = list(read_lines(run.attempt(1).ranks))
    assert [x["step"] for x in lines] == list(range(1, 9))
    assert all(len(x["busy_s"]) == 2 and min(x["wait_s"]) >= 0.06 for x in lines)
    told = list(read_lines(run.attempt(1).metrics))
    slow = [x for x in told if x["event"] == "slow" and x["what"] == "compute"]
    assert [x["rank"] for x in slow] == [1]
    assert "of the time is waiting for data; " in done.text


TWICE = """
import torch
from torch.utils.data import DataLoader, TensorDataset
import hpcddp
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = DataLoader(TensorDataset(torch.rand(8, 2)), num_workers=1, persistent_workers=True)
run = hpcddp.attach(model, optimizer)
for count in (1, 3):
    for epoch in run.epochs(count):
        for (x,) in run.batches(loader):
            model(x).sum().backward()
            optimizer.step()
            run.step()
    print("stops", run.should_stop(), run.steps)
held = iter(loader)
{more}
"""
# A new process takes its time.
LATE = "import os, time; os.register_at_fork(after_in_child=lambda: time.sleep(1))"


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("print('end')", "0: end"),
        (f"{LATE}; loader._iterator = None; held = iter(loader); print('end')", "0: end"),
        ("next(run.batches(loader)); next(run.batches(loader))", "epoch 3 was already read"),
        (
            "run.state['x'] = model.weight; run.save()",
            "run.state['x'] is a Parameter, expected plain",
        ),
    ],
)
def test_two_phases_and_mistakes(site: Site, command: Command, more: str, told: str) -> None:
    """Its data workers, which live as long as the loader, do not keep it from ending."""
    site.write("twice.py", TWICE.replace("{more}", more))
    done = command("submit", "--set", "requeue.crashes=1", "--", sys.executable, "twice.py")
    assert "0: stops False 8" in done.text and "0: stops False 24" in done.text
    assert told in done.text and done.code == (told != "0: end")


def test_nothing_is_imported_before_it_is_asked_for() -> None:
    code = "import sys, hpcddp; assert 'torch' not in sys.modules and hpcddp.attach; import torch"
    code += "; assert 'lightning' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


SELDOM = """
import time
import torch
from torch.utils.data import DataLoader, TensorDataset
import hpcddp
model = torch.nn.Linear(2, 1)
class Own(torch.optim.SGD):
    def step(self):
        self.param_groups[0]["lr"] = None  # it finds that out by itself
optimizer = Own(model.parameters(), 0.1)
loader = DataLoader(TensorDataset(torch.rand(160, 2)), batch_size=4)
begun = time.monotonic()
run = hpcddp.attach(model, optimizer, log_every=5)
for epoch in run.epochs(1):
    for (x,) in run.batches(loader):
        loss = model(x).mean()
        loss.backward()
        optimizer.step()
        time.sleep(0.01)
        run.step(loss if run.steps % 10 == 9 and run.steps < 20 else None)
print("took", time.monotonic() - begun)
"""


def test_a_loss_that_is_told_seldom_or_never_leaves_the_speed_right(
    site: Site, command: Command
) -> None:
    site.write("seldom.py", SELDOM)
    done = command("submit", "--", sys.executable, "seldom.py")
    assert done.code == 0, done.text
    (run,) = runs(site)
    told = [r for r in read_lines(run.attempt(1).metrics) if r["event"] in ("train", "step")]
    steps = [r["step"] for r in told]
    assert steps == [1, *range(5, 41, 5)]
    assert [r["step"] for r in told if r["event"] == "train"] == [10, 20]
    each = [r["step_s"] * count for r, count in zip(told, [1, 4, *[5] * 7], strict=True)]
    assert 40 * 0.01 <= sum(each) <= float(next(iter(said(run, "took"))).split()[1])
    assert [r["samples_per_s"] * r["step_s"] for r in told] == pytest.approx([4] * len(told))
    assert [r["step"] for r in read_lines(run.attempt(1).ranks)] == steps


AT_THE_END = """
import os
import torch
import hpcddp
from hpcddp.rundir import RunDir, write_json
from hpcddp.train.checkpoint import disk_retry, publish
disk_retry.PAUSE = 0.1
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run = hpcddp.attach(model, optimizer)
mark, tries = publish.mark, []
def full(*words):
    tries.append(1)
    if len(tries) < 3 or {stop}:
        if len(tries) == 3:
            write_json(RunDir(os.environ["HPCDDP_RUN_DIR"]).request, {{"want": "stop"}})
        raise OSError(28, "No space left on device")
    return mark(*words)
publish.mark = full
for _ in run.epochs(1):
    optimizer.step()
    run.step()
print("over", len(tries))
"""


@pytest.mark.parametrize(
    ("stop", "state", "told"),
    [("False", "COMPLETED", "0: over 3"), ("True", "STOPPED", "the run goes back to step 0")],
    ids=["room", "a stop"],
)
def test_at_its_end_it_waits_for_room_and_hears_a_stop(
    site: Site, command: Command, stop: str, state: str, told: str
) -> None:
    site.write("end.py", AT_THE_END.format(stop=stop))
    done = command("submit", "--", sys.executable, "end.py")
    assert "cannot save the last step, 1; all ranks retry for up to 300 s" in done.text
    assert told in done.text
    assert json.loads(command("status", "last", "--json").out)["state"] == state
