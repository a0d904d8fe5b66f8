"""A rank's whole life, in real processes over gloo."""

import json
import os
import pickle
import signal
import subprocess
import sys

import pytest
import torch
from ranks import TASK, WORKER, Ranks, make_run, one_rank, records, wait_for

from hpcddp.rundir import write_json
from hpcddp.topology import Rank
from hpcddp.train.checkpoint import checkpoint, dcp_files
from hpcddp.worker import Worker

HEAVY = ["sklearn", "tensorboard", "torch.distributed.checkpoint", "rich", "click", "jinja2"]

TELL_MODULES = f"""
import sys
_loss = loss
def loss(output, target):
    if not hasattr(sys, "told"):
        sys.told = [m for m in {HEAVY} if m in sys.modules]
        print("loaded before the first step:", sys.told, flush=True)
    return _loss(output, target)
"""

SLOW = """
import time
_loss = loss
def loss(output, target):
    time.sleep(0.005)
    return _loss(output, target)
"""
# Long enough for a signal to come to it in time.
SLOWER = SLOW.replace("0.005", "0.05 if os.environ['HPCDDP_ATTEMPT'] == '1' else 0.005").replace(
    "import time", "import os, time"
)


def last_state(run):
    """Every tensor of the newest checkpoint."""
    return dcp_files.read_all(checkpoint.complete(run.checkpoints)[0])


def test_two_ranks_train_and_leave_with_zero(tmp_path):
    run = make_run(tmp_path, gpus=2, extra=TELL_MODULES, epochs=1, max_steps=0)
    with Ranks.of(run, 2) as ranks:
        ends = ranks.wait()
    assert [(code, err) for code, _, err in ends] == [(0, ""), (0, "")]
    out = ends[0][1]
    assert "loaded before the first step: []" in out
    assert "gloo on CPU, 2 ranks" in out
    accuracy = records(run, "eval")[-1]["counted"]["accuracy"]
    assert f"accuracy {accuracy / 7:.4f} ({accuracy} of 7 held-out samples, seed 0)" in out
    (map_,) = records(run, "ranks")
    assert [(r["rank"], r["node"], r["local"]) for r in map_["ranks"]] == [(0, 0, 0), (1, 0, 1)]
    assert len({r["pid"] for r in map_["ranks"]}) == 2
    assert not run.attempt(1).stacks.exists()  # the watchdog of a good run leaves nothing
    assert [r["step"] for r in records(run, "train")] == list(range(1, 10))  # 37 // 4
    assert [r["outcome"] for r in records(run, "end")] == ["done"]
    assert "train" not in ends[1][1] and "accuracy" not in ends[1][1]  # rank 0 alone speaks


def test_a_signal_to_one_rank_stops_all_at_one_step_and_nothing_is_lost(tmp_path):
    job = {"gpus": 2, "extra": SLOW, "model__dropout": 0.3, "max_steps": 120}
    whole = make_run(tmp_path / "whole", **job)
    with Ranks.of(whole, 2) as ranks:
        assert [code for code, _, _ in ranks.wait()] == [0, 0]

    cut = make_run(tmp_path / "cut", **job | {"extra": SLOWER})
    with Ranks.of(cut, 2) as ranks:
        wait_for(lambda: len(records(cut, "train")) > 5, "5 steps")
        ranks.processes[1].send_signal(signal.SIGUSR2)
        assert [code for code, _, _ in ranks.wait()] == [85, 85]
    (end,) = records(cut, "end")
    assert end["outcome"] == "stopped" and end["step"] < 120
    with Ranks.of(cut, 2, attempt=2) as ranks:
        assert [code for code, _, _ in ranks.wait()] == [0, 0]

    (start,) = records(cut, "start", attempt=2)
    assert (start["step"], start["resumed"]) == (end["step"], f"checkpoints/step-{end['step']}")
    a, b = last_state(whole), last_state(cut)
    assert a.keys() == b.keys() and len(a) > 10
    assert [n for n in a if not torch.equal(a[n], b[n])] == []  # RNG included, dropout's too
    losses = [[r["loss"] for n in (1, 2) for r in records(run, "train", n)] for run in (whole, cut)]
    assert losses[0] == losses[1]


def test_a_person_stops_a_run_through_its_folder(tmp_path):
    run = make_run(tmp_path, max_steps=10**6, extra=SLOW)

    def ask(record):
        if record["event"] == "train" and record["step"] == 3:
            write_json(run.request, {"want": "stop"})

    assert one_rank(run, on_record=ask) == "stopped"
    saved = checkpoint.complete(run.checkpoints)[0]
    assert saved.name == f"step-{records(run, 'end')[0]['step']}"


def test_the_first_failing_rank_is_the_one_that_is_heard(tmp_path):
    boom = TASK + (
        "\nimport os\n_loss = loss\n"
        "def loss(output, target):\n"
        "    if os.environ['RANK'] == '1':\n"
        "        raise ValueError('boom')\n"
        "    return _loss(output, target)\n"
    )
    run = make_run(tmp_path, boom, gpus=2)
    with Ranks.of(run, 2) as ranks:
        (code0, _, err0), (code1, _, err1) = ranks.wait()
    assert (code0, code1) == (1, 1)
    assert "Traceback" in err1 and "ValueError: boom" in err1
    assert err0.strip().splitlines() == ["rank 0 stopped: rank 1 failed first (ValueError: boom)"]
    told = json.loads(run.attempt(1).error.read_text())
    assert (told["rank"], told["type"], told["message"]) == (1, "ValueError", "boom")
    assert "in loss" in told["traceback"]


def test_signals_during_start_and_to_data_workers_lose_nothing(tmp_path):
    """TERM comes while the task is imported, where the user has a handler of their own; each
    DataLoader worker gets one for every sample."""
    extra = f"""
import os, pathlib, signal
signal.signal(signal.SIGTERM, lambda *a: pathlib.Path({str(tmp_path / "own")!r}).write_text("x"))
_dataset = dataset
class Signalled(torch.utils.data.Dataset):
    def __init__(self, inner): self.inner = inner
    def __len__(self): return len(self.inner)
    def __getitem__(self, i):
        os.kill(os.getpid(), signal.SIGTERM)
        return self.inner[i]
def dataset(split):
    if split == "train":
        return Signalled(_dataset(split))
def model(_model=model):
    os.kill(os.getpid(), signal.SIGTERM)
    return _model()
"""
    run = make_run(tmp_path, extra=extra, max_steps=10**6, data__workers=1)
    with Ranks(run, [{}]) as ranks:
        ((code, _, err),) = ranks.wait()
    assert (code, err) == (85, "")
    assert (tmp_path / "own").exists()
    assert len(checkpoint.complete(run.checkpoints)) == 1


SUBMITIT = """
import signal
from submitit.core.job_environment import SignalHandler
theirs = SignalHandler.__new__(SignalHandler)  # its methods are what submitit installs
for number in (signal.SIGTERM, signal.SIGCONT):
    signal.signal(number, theirs.bypass)
signal.signal(signal.SIGUSR2, theirs.checkpoint_and_try_requeue)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_ends_a_rank_at_once_that_waits_for_the_others(tmp_path, number):
    """The other one never comes: it has died of the same signal, say. Handlers of submitit's are
    there before."""
    run = make_run(tmp_path, gpus=2)
    with Ranks(run, [Rank(0, 2, 0, 2, 0).to_env()], first=SUBMITIT) as ranks:
        ranks.met_by(0)
        ranks.processes[0].send_signal(number)
        ((code, _, err),) = ranks.wait(5)
    assert (code, err) == (-number, "")
    assert not run.attempt(1).error.exists()


def test_so_do_forked_ranks_and_their_node_leaves_with_the_signals_code(tmp_path):
    run = make_run(tmp_path, nodes=(2, 2), gpus=2)
    words = [*WORKER[:-1], "hpcddp.launch.fork", "2", sys.executable, "-P", "-m", "hpcddp.worker"]
    with Ranks(run, [Rank(0, 2, 0, 1, 0).to_env()], words=words) as ranks:
        for rank in (0, 1):
            ranks.met_by(rank)
        ranks.processes[0].send_signal(signal.SIGTERM)
        ((code, _, _),) = ranks.wait(5)
    assert code == 128 + signal.SIGTERM


AT_CONNECTING = """
import os, signal, torch.distributed as dist
def signalled(*a, _init=dist.init_process_group, **k):
    os.kill(os.getpid(), signal.SIGTERM)
    _init(*a, **k)
dist.init_process_group = signalled
"""


def test_a_signal_that_comes_as_soon_as_all_have_met_stops_all_at_the_first_vote(tmp_path):
    run = make_run(tmp_path, max_steps=10**6)
    with Ranks(run, [{}], first=AT_CONNECTING) as ranks:
        ((code, _, err),) = ranks.wait()
    assert (code, err) == (85, "")
    assert records(run, "end")[0]["by"] == "SIGTERM"


def test_a_users_mistake_is_told_without_a_traceback(tmp_path):
    run = make_run(tmp_path, dataset__colour="red")
    with Ranks(run, [{}]) as ranks:
        ((code, _, err),) = ranks.wait()
    assert code == 1
    assert "Traceback" not in err and "colour" in err and "small_task.py" in err
    assert json.loads(run.attempt(1).error.read_text())["type"] == "JobFileError"


def test_worker_is_plain_data_and_light():
    again = pickle.loads(pickle.dumps(Worker("/some where/run")))
    assert again.run_dir == "/some where/run"
    code = (
        "import sys, hpcddp.worker; print(sorted({'torch', 'numpy', 'submitit'} & {*sys.modules}))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "[]\n"


def test_the_current_folder_is_not_searched(tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('the wrong torch')")
    run = make_run(tmp_path / "job", max_steps=1)
    out = subprocess.run(
        [sys.executable, "-P", "-m", "hpcddp.worker", str(run.path)],
        cwd=tmp_path,
        env={**os.environ, "HPCDDP_ATTEMPT": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert out.returncode == 0, out.stderr


BUSY_WORKERS = """
import time
_dataset, _loss, calls = dataset, loss, []
class Busy(torch.utils.data.Dataset):
    def __init__(self, inner): self.inner = inner
    def __len__(self): return len(self.inner)
    def __getitem__(self, i):
        if calls.append(i) or len(calls) > 8:
            time.sleep(600)
        return self.inner[i]
def dataset(split):
    return Busy(_dataset(split))
def loss(output, target):
    raise ValueError("boom")
"""


def test_a_failing_rank_leaves_at_once_whatever_its_data_workers_do(tmp_path):
    run = make_run(tmp_path, extra=BUSY_WORKERS, data__workers=2)
    with Ranks(run, [{}]) as ranks:
        failed = wait_for(
            lambda: run.attempt(1).error.exists() and json.loads(run.attempt(1).error.read_text()),
            "the failure",
        )
        ((code, _, err),) = ranks.wait(20)  # a data worker sleeps thirty times as long
    assert code == 1 and "ValueError: boom" in err
    assert failed["kind"] == "mistake"


def test_code_that_fails_before_any_step_is_a_mistake(tmp_path):
    run = make_run(tmp_path, extra="\ndef loss(output, target):\n    return nowhere\n")
    with Ranks(run, [{}]) as ranks:
        ((code, _, err),) = ranks.wait()
    assert code == 1 and "NameError" in err
    assert json.loads(run.attempt(1).error.read_text())["kind"] == "mistake"
