"""A stop in the middle of an evaluation: it is broken off, and made up for."""

import pytest
from ranks import TASK, Ranks, make_run, records

BREAKS = """
import os, signal, time
batches = 0
good = metrics
def metrics(output, target):
    global batches
    batches += 1
    time.sleep(0.1)  # quicker batches are not worth a vote each
    if os.environ.get("BREAK") and os.environ["HPCDDP_ATTEMPT"] == "1" and batches == 3:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGUSR2)
    return good(output, target)
"""
KEYS = {"data__eval_batch": 2, "epochs": 2, "max_steps": 0, "dataset": {"size": 16, "held_out": 41}}


@pytest.fixture
def whole(tmp_path):
    run = make_run(tmp_path / "whole", TASK, gpus=2, extra=BREAKS, **KEYS)
    with Ranks.of(run, 2) as ranks:
        assert [code for code, _, err in ranks.wait()] == [0, 0]
    return run


def test_a_stop_breaks_an_evaluation_off_and_the_next_attempt_makes_up_for_it(
    tmp_path, whole, monkeypatch
):
    monkeypatch.setenv("BREAK", "1")
    run = make_run(tmp_path / "broken", TASK, gpus=2, extra=BREAKS, **KEYS)
    with Ranks.of(run, 2) as ranks:
        ends = ranks.wait()
    assert [code for code, *_ in ends] == [85, 85], ends
    assert records(run, "eval") == []
    (end,) = records(run, "end")
    assert (end["step"], end["saved"]) == (4, 4)
    with Ranks.of(run, 2, attempt=2) as ranks:
        assert [code for code, *_ in ranks.wait()] == [0, 0]

    def told(run, attempt):
        return [(r["step"], r["metrics"], r["count"]) for r in records(run, "eval", attempt)]

    assert told(run, 2) == told(whole, 1)
    assert [step for step, *_ in told(run, 2)] == [4, 8]
