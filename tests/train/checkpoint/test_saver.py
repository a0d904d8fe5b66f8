"""Saves beside the training: of one step, on all ranks together, and never in its way."""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from ranks import CALM, Ranks, begin, make_run, one_rank, records, steps, wait_for

from hpcddp.errors import CheckpointError
from hpcddp.rundir import write_json
from hpcddp.train.checkpoint import checkpoint, damage, dcp_files, disk_retry
from hpcddp.train.checkpoint.save_writer import SaveWriter
from hpcddp.train.divergence import DivergenceDetector

# The weights change a lot in each step, and everything is there that a forward pass changes.
MODEL = """
def model(width=64):
    return nn.Sequential(
        nn.Linear(4, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Dropout(0.3),
        nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, 2),
    ).double()
def optimizer(model, train):
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
"""
# Also 16 MB that only the optimizer touches: to copy them takes longer than a forward and backward
# pass of four samples, so that an optimizer step that does not wait falls into the copy.
TABLE = """
_model = model
def model():
    m = _model()
    m.table = nn.Parameter(torch.zeros(2_000_000, dtype=torch.float64), requires_grad=False)
    return m
class Shaking(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)  # first: the small ones are copied last
        self.param_groups[0]["params"][0].mul_(-1.5).add_(1)
def optimizer(model, train):
    return Shaking([model.table, *list(model.parameters())[1:]], lr=0.5, momentum=0.9)
"""


def differing(one, other):
    """The names of tensors that two checkpoints have not alike, bit for bit."""
    a, b = dcp_files.read_all(one), dcp_files.read_all(other)
    assert a.keys() == b.keys() and len(a) > 10
    return [name for name in a if not torch.equal(a[name], b[name])]


@pytest.mark.parametrize("world", [1, 2])
def test_a_save_is_of_one_step_while_the_training_goes_on(tmp_path, world):
    """Beside runs that end with that step."""
    job = {"extra": MODEL + TABLE, "gpus": world, "max_steps": 9, "checkpoint__every": 3,
           "checkpoint__keep": 9, **CALM}  # fmt: skip

    def train(name, **more):
        run = make_run(tmp_path / name, **{**job, **more})
        if world == 1:
            one_rank(run)
            return run
        with Ranks.of(run, world) as ranks:
            assert [(code, err) for code, _, err in ranks.wait()] == [(0, "")] * world
        return run

    whole = train("whole")
    assert steps(whole) == [9, 6, 3]
    for step in (3, 6)[: 3 - world]:
        cut = train(f"cut-{step}", max_steps=step, checkpoint__every=0)
        name = f"step-{step}"
        assert differing(whole.checkpoints / name, cut.checkpoints / name) == []
    saved = records(whole, "checkpoint")
    assert [r["step"] for r in saved] == [3, 6, 9]
    assert all(0 < r["blocked_s"] <= r["seconds"] and 16e6 < r["bytes"] < 17e6 for r in saved)


LIMITED = """
import os, resource
_loss, seen = loss, []
def loss(output, target):
    seen.append(1)
    if os.environ["RANK"] == "1" and len(seen) in (7, 13):
        limit = 5000 if len(seen) == 7 else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    return _loss(output, target)
"""


def test_a_disk_that_fails_one_rank_fails_the_save_on_all_and_nothing_else(tmp_path):
    """Rank 1 cannot write more than 5 kB from step 7 to 12: the save of step 9 breaks in the middle
    of its file, and may be those of 6 and 12, which begin or end at that time."""
    extra = MODEL + LIMITED
    job = {"gpus": 2, "max_steps": 16, "checkpoint__every": 3, "checkpoint__keep": 9, **CALM}
    run = make_run(tmp_path / "limited", extra=extra, **job)
    with Ranks.of(run, 2) as ranks:
        (code, out, err), (other, _, _) = ranks.wait()
    assert (code, other, err) == (0, 0, "")
    failed = {r["step"]: r for r in records(run, "checkpoint_failed")}
    assert 9 in failed and failed.keys() <= {6, 9, 12}
    assert steps(run) == [step for step in (16, 15, 12, 9, 6, 3) if step not in failed]
    assert failed[9]["reason"].startswith("rank 1: ") and failed[9]["saved"] in (3, 6)
    assert f"step 9  NOT saved: {failed[9]['reason']}; the newest is of step" in out
    assert all(p.name.startswith("step-") for p in run.checkpoints.iterdir())
    free = make_run(tmp_path / "free", extra=extra.replace("5000", "5000000"), **job)
    with Ranks.of(free, 2) as ranks:
        assert [code for code, _, _ in ranks.wait()] == [0, 0]
    assert differing(free.checkpoints / "step-16", run.checkpoints / "step-16") == []


@pytest.fixture
def small_disk(tmp_path):
    """A run whose checkpoints lie on a file system of 1 MB, and ballast that fills it."""
    run = make_run(tmp_path, extra=MODEL, max_steps=10**6, checkpoint__every=2,
                   checkpoint__keep=2, **CALM)  # fmt: skip
    run.checkpoints.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(run.checkpoints)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting needs root; a limit on the file size is tested everywhere")
    yield run, run.checkpoints / "ballast"
    subprocess.run(["umount", "--lazy", str(run.checkpoints)], check=True)


def fill(path, leave=0):
    """Take all room but so many bytes."""
    space = os.statvfs(path.parent)
    with open(path, "wb", buffering=0) as f:
        try:
            f.write(bytes(max(0, space.f_bavail * space.f_frsize - leave)))
        except OSError as error:
            assert error.errno == errno.ENOSPC


@pytest.mark.parametrize("leave", [0, 40_000], ids=["before a save", "in the middle of one"])
def test_a_full_disk_keeps_the_old_checkpoints_and_the_training(small_disk, capsys, leave):
    run, ballast = small_disk

    def events(record):
        if record["event"] == "checkpoint" and record["step"] == 4:
            fill(ballast, leave)
        if record["event"] == "checkpoint_failed":
            assert steps(run)[0] == 4
            assert {p.name for p in run.checkpoints.iterdir() if p.name[0] == "s"} == {
                "step-2", "step-4"
            }  # fmt: skip
            if record["step"] >= 10:
                ballast.unlink(missing_ok=True)
        if record["event"] == "checkpoint" and record["step"] > 10:
            write_json(run.request, {"want": "stop"})

    assert one_rank(run, on_record=events) == "stopped"
    failed = [r["step"] for r in records(run, "checkpoint_failed")]
    assert 6 in failed and 8 in failed
    assert steps(run)[0] == records(run, "end")[0]["step"] > 10
    assert "NOT saved" in capsys.readouterr().out
    assert [p.name for p in run.checkpoints.iterdir() if p.name.startswith(".")] == []


def test_a_stop_on_a_full_disk_is_a_stop_and_says_where_the_run_goes_back_to(small_disk, capsys):
    run, ballast = small_disk

    def events(record):
        if record["event"] == "checkpoint" and record["step"] == 4:
            fill(ballast)
            write_json(run.request, {"want": "stop"})

    assert one_rank(run, on_record=events) == "stopped"
    (end,) = records(run, "end")
    assert end["saved"] == 4 < end["step"]
    assert "could not be saved: the run goes back to step 4" in capsys.readouterr().out
    assert steps(run) == [4, 2]


def test_a_training_whose_end_cannot_be_saved_is_not_done(small_disk, monkeypatch, capsys):
    run, ballast = small_disk
    fill(ballast)
    monkeypatch.setattr(disk_retry, "PAUSE", 0.1)
    monkeypatch.setattr(disk_retry, "SECONDS", 0.5)
    with pytest.raises(CheckpointError, match="cannot save the last step, 3"):
        one_rank(run, max_steps=3)
    assert records(run, "end") == []
    line = "cannot save the last step, 3; all ranks retry for up to 0.5 s"
    assert capsys.readouterr().out.count(line) == 1
    assert len(records(run, "checkpoint_failed")) > 3


@pytest.mark.parametrize(
    ("outcome", "saved"), [("done", 3), ("stopped", None)], ids=["room", "a stop"]
)
def test_a_training_at_its_end_waits_for_room_and_hears_a_stop(
    small_disk, monkeypatch, outcome, saved
):
    run, ballast = small_disk
    fill(ballast)
    monkeypatch.setattr(disk_retry, "PAUSE", 0.1)

    def events(record):
        if record["event"] != "checkpoint_failed" or record["step"] < 3:
            return
        if outcome == "done":
            ballast.unlink(missing_ok=True)
        else:
            write_json(run.request, {"want": "stop"})

    assert one_rank(run, max_steps=3, on_record=events) == outcome
    (end,) = records(run, "end")
    assert (end["outcome"], end["step"], end["saved"]) == (outcome, 3, saved)
    assert steps(run) == ([3] if saved else [])


def test_a_failure_while_a_save_runs_lets_it_end_and_is_the_one_that_is_heard(tmp_path):
    boom = MODEL + (
        "\nimport os\nfrom hpcddp.train.checkpoint import saver\n"
        "saver.GRACE = 60.0  # a slow disk is another matter\n"
        "_loss, seen = loss, []\n"
        "def loss(output, target):\n"
        "    seen.append(1)\n"
        "    if os.environ['RANK'] == '1' and len(seen) == 7:\n"
        "        raise ValueError('boom')\n"
        "    return _loss(output, target)\n"
    )
    run = make_run(tmp_path, extra=boom, gpus=2, max_steps=9, checkpoint__every=3, **CALM)
    with Ranks.of(run, 2) as ranks:
        (code0, _, err0), (code1, _, err1) = ranks.wait()
    assert (code0, code1) == (1, 1)
    assert "ValueError: boom" in err1 and "rank 1 failed first" in err0
    assert steps(run) == [6, 3]


def test_the_loop_waits_for_no_import_in_a_first_save(tmp_path):
    extra = """
import sys
from hpcddp.train.checkpoint.host_copy import HostCopies
_copy = HostCopies.copy
def copy(self):
    print("dcp at the copy:", "torch.distributed.checkpoint" in sys.modules)
    _copy(self)
HostCopies.copy = copy
"""
    with Ranks.of(make_run(tmp_path, extra=extra, max_steps=1), 1) as ranks:
        ((code, out, _),) = ranks.wait()
    assert code == 0 and "dcp at the copy: False" in out


def test_a_save_that_breaks_before_its_copy_blocks_nobody(tmp_path, monkeypatch):
    def broken(self, save):
        raise ImportError("no such library")

    monkeypatch.setattr(SaveWriter, "_write", broken)
    with pytest.raises(ImportError, match="no such library"):
        one_rank(make_run(tmp_path, checkpoint__every=2, **CALM))


def test_a_look_at_the_weights_counts_as_time_that_a_save_took(tmp_path, monkeypatch):
    monkeypatch.setattr(DivergenceDetector, "check", lambda self, step: time.sleep(0.2))
    run = make_run(tmp_path, max_steps=2, **CALM)
    one_rank(run)
    (saved,) = records(run, "checkpoint")
    assert 0.2 <= saved["blocked_s"] <= saved["seconds"]


# Imports once, and then lives as often as it is asked to; each life is a process of its own.
LIVES = """
import os, sys
from hpcddp import worker
from hpcddp.rundir import RunDir
from hpcddp.topology import Rank
import hpcddp.train.job, hpcddp.train.checkpoint.dcp_files
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_RDWR), 1)
        worker.run(RunDir(sys.argv[1]), Rank(0, 1, 0, 1, 0), int(line))
        os._exit(0)
    print(pid, flush=True)
    os.waitpid(pid, 0)
    print("gone", flush=True)
"""


def kills(run, seed, number):
    """Kill lives at random instants; after each, the newest checkpoint is whole and of one step."""
    rng = random.Random(seed)
    print("seed", seed)
    command = [sys.executable, "-c", LIVES, str(run.path)]
    lives = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    pid, newest = None, 0
    try:
        for _ in range(number):
            attempt = begin(run)
            lives.stdin.write(f"{attempt}\n")
            lives.stdin.flush()
            pid = int(lives.stdout.readline())
            wait_for(lambda n=attempt: records(run, "checkpoint", n), "a checkpoint")
            instant = time.monotonic() + rng.uniform(0, 0.2)
            wait_for(lambda end=instant: time.monotonic() > end, "the instant")
            os.kill(pid, signal.SIGKILL)
            assert lives.stdout.readline() == "gone\n"
            pid = None
            recorded = records(run, "checkpoint", attempt)[-1]["step"]
            newest = check_newest(run, least=max(newest, recorded))
    finally:
        if pid:
            os.kill(pid, signal.SIGKILL)
        lives.kill()
        lives.communicate()


def check_newest(run, least):
    """Its step, which is that of all that lies in it."""
    folder = checkpoint.complete(run.checkpoints)[0]
    step = checkpoint.step_of(folder)
    assert step >= least
    assert damage.of_content(folder) == "" and damage.of_format(folder) == ""
    tensors = dcp_files.read_all(folder)
    counts = {t.item() for name, t in tensors.items() if name.endswith(".step")}
    assert counts == {step} and tensors["model.1.num_batches_tracked"] == step
    return step


@pytest.mark.parametrize("event", ["checkpoint", "checkpoint_failed"])
def test_what_a_save_takes_is_known_from_the_life_before(tmp_path, monkeypatch, event):
    """The limit is 150 s away: enough for one of 5 s, and not for one of 95 s."""
    run = make_run(tmp_path, max_steps=30, **CALM)
    tell(run, 1, {"event": event, "seconds": 95.0}, {"event": event, "seconds": 3.0})
    tell(run, 2, {"event": "train"})  # it has not saved
    monkeypatch.setenv("HPCDDP_DEADLINE", str(time.time() + 150))
    assert one_rank(run, 3) == "stopped"
    assert records(run, "end", 3)[0]["by"] == "time limit" and steps(run)[0] < 30
    assert one_rank(run, 4) == "done"  # the save of attempt 3 was quick


def tell(run, attempt, *lines):
    metrics = run.attempt(attempt).metrics
    metrics.parent.mkdir()
    metrics.write_text("".join(json.dumps(record) + "\n" for record in lines))


KILLED = MODEL.split("def optimizer")[0]


@pytest.mark.parametrize("number", [6, pytest.param(100, marks=pytest.mark.full)])
def test_killed_at_any_instant_the_newest_checkpoint_is_whole(tmp_path, number):
    run = make_run(tmp_path, extra=KILLED, max_steps=10**6, checkpoint__every=1,
                   train__log_every=10**6, **CALM)  # fmt: skip
    kills(run, seed=random.randrange(10**6), number=number)
    assert one_rank(run, begin(run), max_steps=1) == "done"
    assert len(list(run.checkpoints.iterdir())) <= 3


def test_a_tensor_that_only_one_rank_has_is_an_error_and_not_left_out(tmp_path):
    extra = (
        "\nimport os\n"
        "def optimizer(model, train):\n"
        "    momentum = 0.9 * int(os.environ['RANK'])\n"
        "    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)\n"
    )
    run = make_run(tmp_path, extra=extra, gpus=2, max_steps=2)
    with Ranks.of(run, 2) as ranks:
        (code, out, _), (other, _, _) = ranks.wait()
    assert (code, other) == (1, 1) and "have different tensors" in out
    assert steps(run) == []
