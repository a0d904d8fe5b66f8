"""The launcher horovod on the real Slurm."""

import json
import sys

import pytest
from horovod_script import MEET, RESULT, gone, same, script

from .desk import Desk

SIZE = ("--nodes", "2", "--gpus", "2")


def test_ranks_of_two_nodes_meet_and_a_rank_that_fails_ends_all(desk: Desk) -> None:
    (desk.folder / "horovod").mkdir()
    (desk.folder / "horovod/__init__.py").touch()
    (desk.folder / "train.py").write_text(MEET)
    once = ("--no-snapshot", "--set", "requeue.crashes=1", "--follow")
    words = ("--", sys.executable, "train.py", "fail")
    desk("submit", *SIZE, *once, "--launcher", "horovod", *words, code=1)
    assert [(a.cause, a.exit_code) for a in desk.attempts()] == [("crash", 3)]
    told = [json.loads((desk.folder / f"told-{rank}").read_text()) for rank in range(4)]
    assert [row["HOROVOD_CROSS_RANK"] for row in told] == ["0", "0", "1", "1"]
    gone(int(told[0]["HOROVOD_GLOO_RENDEZVOUS_PORT"]))


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_horovod_and_ddp_print_the_same_digits(desk: Desk, built_horovod: str) -> None:
    found = []
    for mark, launcher in (("-", "horovod"), ("+", "srun")):
        (desk.folder / "train.py").write_text(script(mark))
        given = ("--launcher", launcher, "--env", f"PYTHONPATH={built_horovod}", "--follow")
        desk("submit", *SIZE, *given, "--", sys.executable, "train.py")
        found += RESULT.findall(desk("logs", "last"))
    same(found)
