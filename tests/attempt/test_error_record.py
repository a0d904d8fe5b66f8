"""error.json: one record of what failed, its kind, and whose it is."""

import json
import threading

import pytest
import torch
import torch.distributed as dist

from hpcddp.attempt.error_record import kind_of, report
from hpcddp.errors import CheckpointError, Diverged, JobFileError
from hpcddp.rundir import RunDir

GLOO = RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:1")
FACTS = {"rank": 3, "host": "n2", "step": 7, "loss": "nan", "what": "loss"}


@pytest.fixture
def attempt(tmp_path):
    run = RunDir(tmp_path)
    run.attempts.mkdir()
    return run.attempt(1)


@pytest.mark.parametrize(
    ("error", "stepped", "kind"),
    [
        (ValueError("x"), False, "mistake"),
        (OSError("x"), False, "crash"),
        (KeyError("x"), True, "crash"),
        (KeyError("x"), False, "mistake"),
        (ModuleNotFoundError("No module named 'nmpy'"), False, "mistake"),
        (SyntaxError("x"), False, "mistake"),
        (TypeError("x"), True, "crash"),
        (JobFileError("x"), True, "mistake"),
        (CheckpointError("x"), False, "crash"),
        (Diverged("x", FACTS), True, "diverged"),
        (MemoryError(), True, "oom"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True, "oom"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), True, "oom"),
        (GLOO, True, "peer"),
        (dist.DistBackendError("NCCL error: remote process exited"), True, "peer"),
        (dist.DistNetworkError("failed to recv, got 0 bytes"), True, "peer"),
        (ConnectionResetError("Connection reset by peer"), True, "crash"),  # the user's network
    ],
)
def test_kinds(error, stepped, kind):
    assert kind_of(error, stepped=stepped) == kind


def test_the_cause_takes_the_place_of_a_lost_peer_once(attempt):
    assert "Connection closed" in report(GLOO, attempt, 0)
    assert "rank 1 on" in report(ValueError("the cause"), attempt, 1)
    assert "rank 1 failed first (ValueError: the cause)" in report(KeyError("later"), attempt, 2)
    assert "rank 1 failed first" in report(GLOO, attempt, 3)
    told = json.loads(attempt.error.read_text())
    assert (told["rank"], told["kind"], told["message"]) == (1, "crash", "the cause")
    assert "Traceback" in told["traceback"] or "ValueError" in told["traceback"]


def test_of_many_that_fail_at_once_one_is_heard(attempt):
    report(GLOO, attempt, 0)
    gate, said = threading.Barrier(8), []

    def fail(rank):
        gate.wait()
        said.append(report(ValueError(f"cause {rank}"), attempt, rank))

    threads = [threading.Thread(target=fail, args=(rank,)) for rank in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told = json.loads(attempt.error.read_text())
    first = [text for text in said if "failed first" not in text]
    assert len(first) == 1 and told["message"] in first[0]
    assert [p.name for p in attempt.path.iterdir() if p.name.startswith(".error")] == [
        ".error.peer"
    ]


def test_what_all_ranks_know_of_one_is_told_of_that_one(attempt):
    text = report(Diverged("the loss of rank 3 is nan at step 7", FACTS), attempt, 0)
    assert text.startswith("rank 3 on n2: the loss of rank 3 is nan at step 7\n")
    told = json.loads(attempt.error.read_text())
    assert {name: told[name] for name in FACTS} == FACTS
    assert (told["type"], told["kind"], told["traceback"]) == ("Diverged", "diverged", "")
