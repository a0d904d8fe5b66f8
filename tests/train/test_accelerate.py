"""An Accelerate script on its run: it comes back where it was, and ends as if undisturbed."""

from local_runs import Command
from own_loops import both, said
from sites import SUPPORT, Site

from hpcddp.sandbox import compare

SCRIPT = str(SUPPORT / "accelerate_script.py")


def test_preempted_it_loses_no_step_and_ends_as_if_undisturbed(
    site: Site, command: Command
) -> None:
    reference, run = both(site, command, SCRIPT, "3", at=(11,))
    assert compare.difference(reference, run, 2) == ""
    assert said(run, "over") == said(reference, "over")
    # 26 batches of each rank, two to a step, in three epochs.
    assert [line.split()[1] for line in said(run, "over")] == ["39"]
