"""The attempts of a run, and why each ended."""

import json
import sys
from pathlib import Path

import pytest
from local_runs import Command
from made import made_run
from sites import Site
from toy import TOY

from hpcddp.observe import history

SRUN = "srun: error: n2: tasks 3,5-6: Killed\nsrun: error: n1: task 0: Killed\n"


@pytest.mark.parametrize("cause", [None, "preempted", "time limit", "cancelled"])
def test_nobody_failed_where_ranks_were_ended(tmp_path: Path, cause: str | None) -> None:
    run = made_run(tmp_path, cause=cause, last=300)
    run.attempt(3).log.write_text(SRUN)
    assert history.summaries(run)[-1].error is None


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("import argparse; p = argparse.ArgumentParser(); p.add_argument('--lr', type=float)\n"
         "p.parse_args(['--lr', 'abc'])",
         "exit code 2; rank 0's last line: train.py: error: argument --lr: invalid float value"),
        ("d = {}\nd['x']", "(rank 0: KeyError: 'x'; "),
        ("raise SystemExit(3)", "exit code 3; the log is empty"),
    ],
)  # fmt: skip
def test_why_tells_what_a_program_said(
    site: Site, command: Command, script: str, told: str
) -> None:
    site.write("train.py", script)
    done = command("submit", "--set", "requeue.crashes=1", "--", sys.executable, "train.py")
    assert done.code == 1
    assert told in command("status", "last").out
    assert told.lstrip("(") in command("why", "last").out


KILLS = """
import os, signal
_loss, steps = loss, []
def loss(output, target):
    steps.append(1)
    if os.environ["RANK"] == "1" and len(steps) == 6:
        os.kill(os.getpid(), signal.{signal})
    return _loss(output, target)
"""


SLEEPS = """
import os, signal, time
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("what", "number", "why"),
    [
        (["toy"], "SIGKILL", "was killed: out of memory?"),
        (["toy"], "SIGBUS", "was ended by SIGBUS: is a disk or /dev/shm full?"),
        (["--", sys.executable, "train.py"], "SIGKILL", "was killed: out of memory?"),
    ],
)
def test_a_killed_rank_is_named_wherever_it_is_asked(
    site: Site, command: Command, what: list[str], number: str, why: str
) -> None:
    site.job("toy", "global_batch = 8\nmax_steps = 12\n", TOY + KILLS.format(signal=number))
    site.write("train.py", SLEEPS)
    done = command("submit", "--gpus", "2", "--set", "requeue.enabled=false", *what)
    assert done.code == 1
    assert why in command("status", "last").out
    told = command("why", "last").out
    assert "attempt 1, rank 1 on " in told and "rank 0" not in told
    (row,) = json.loads(command("why", "last", "--json").out)["attempts"]
    assert row["error"]["rank"] == 1
    if what == ["toy"]:  # which tells where its ranks are
        shown = command("watch", "last").out
        assert "1 dead (X)" in shown and "X rank 1 on " in shown
