"""A rank survives SIGKILL. The next attempt starts without its node, and does not wait for it."""

import os
import signal

import pytest
from unkillable import unkillable

from hpcddp.slurm.hostlist import expand_hosts

from .desk import Desk, pids
from .test_survive import SIZE, finished, lost


@pytest.mark.full
def test_a_node_whose_rank_does_not_end_is_replaced(desk: Desk) -> None:
    run = desk.submit(*SIZE, "--spares", "1", "--set", "checkpoint.every=20")
    folder = desk.run(run)
    desk.training(run, step=30)
    (first,) = desk.attempts(run)
    names, ranks = expand_hosts(first.nodes), pids(folder)
    with unkillable(ranks[1]):
        os.kill(ranks[0], signal.SIGKILL)
        desk.training(run, attempt=2)
        second = desk.attempts(run)[-1]
        assert names[1] not in expand_hosts(second.nodes) and len(expand_hosts(second.nodes)) == 2
    finished(desk, run)
    first, second = desk.attempts(run)
    assert (first.action, second.cause, second.job_id) == ("here", "done", first.job_id)
    assert f"lost node {names[1]}: its ranks do not end" in folder.attempt(1).log.read_text()
    assert lost(folder) == 0
