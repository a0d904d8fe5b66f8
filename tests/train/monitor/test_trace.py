"""attempts/N/trace-R.jsonl: written where it was asked for, and what a line says."""

import json

import torch
from ranks import make_run, one_rank, records

from hpcddp.train.input.batches import Micro
from hpcddp.train.monitor.trace import Trace


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_there_is_none_unless_it_is_asked_for(tmp_path):
    run = make_run(tmp_path, max_steps=2)
    one_rank(run)
    assert not list(run.attempt(1).path.glob("trace*"))


def test_a_line_is_there_as_soon_as_the_step_is_taken(tmp_path):
    run = make_run(tmp_path, max_steps=3, train__trace=True)
    seen = []
    one_rank(run, on_record=lambda r: seen.append((r["event"], _count(run))))
    assert [count for event, count in seen if event == "train"] == [1, 2, 3]


def _count(run):
    path = run.attempt(1).trace(0)
    return len(lines(path)) if path.exists() else 0


def test_the_loss_is_that_of_the_metrics(tmp_path):
    run = make_run(tmp_path, max_steps=3, train__trace=True, train__micro_batch=2)
    one_rank(run)
    found = lines(run.attempt(1).trace(0))
    told = [r["loss"] for r in records(run, "train")]
    torch.testing.assert_close([r["loss"] for r in found], told, rtol=1e-6, atol=0)
    assert all(len(r["ids"]) == 4 for r in found)


def test_padding_is_left_out_and_micro_batches_count_by_their_samples(tmp_path):
    path = tmp_path / "trace-0.jsonl"
    trace = Trace(path)
    trace.add([5, 6], Micro(2, 2), torch.tensor(1.0))
    trace.add([7, 0], Micro(2, 1), torch.tensor(4.0))
    trace.add([1, 2], Micro(2, 0), torch.tensor(99.0))
    trace.step(1, 0)
    trace.add([3], Micro(1, 0), torch.tensor(99.0))
    trace.step(2, 0)
    trace.close()
    assert lines(path) == [
        {"step": 1, "epoch": 0, "ids": [5, 6, 7], "loss": 2.0},
        {"step": 2, "epoch": 0, "ids": [], "loss": None},
    ]
