"""The node of the batch script is lost while Slurm does not end the job: others bring it back."""

from pathlib import Path

import pytest

from hpcddp.rundir import read_step

from .desk import LONG, PATIENCE, Slurm
from .test_in_place import without
from .test_policy import tracking
from .test_survive import SIZE, lost


@pytest.mark.full
@pytest.mark.parametrize(("kind", "same"), [("linuxproc", True), ("cgroup", False)])
def test_a_job_without_its_scripts_node_comes_back_at_once(
    slurm: Slurm, tmp_path: Path, kind: str, same: bool
) -> None:
    """Its parents leave at TERM, long before KILL. Where none of its processes lives on to shorten
    its wait in the queue, another job continues. The newest step is saved."""
    with tracking(kind, tmp_path, nodes=4, kill_wait=int(10 * PATIENCE)) as desk:
        run = desk.submit(*SIZE, "--spares", "1", *LONG)
        desk.training(run, step=20)
        (first,) = desk.attempts(run)
        with without(desk, first.host):
            # This Slurm may create no step in the first allocation after the loss.
            before = desk.run(run).attempt(1)
            desk.until(lambda s: s["attempt"] > 1 and s["step"] > read_step(before)[0], run)
        first, *_, last = desk.attempts(run)
        assert (first.job_id == last.job_id, first.host == last.host) == (same, False)
        assert (first.cause, lost(desk.run(run))) == ("node failure", 0)
        desk("cancel", run)
        desk.until(lambda s: s["state"] == "CANCELLED", run)
