"""A job's log, read by pattern: Slurm's words, srun's, and those of our own launchers."""

import pytest

from hpcddp.attempt import log_reader
from hpcddp.attempt.decision import CANCELLED, NODE, PREEMPTED, REQUEUED, TIMEOUT
from hpcddp.attempt.joblog import rank_ended

LOG = """\
srun: Job step aborted: Waiting up to 7 seconds for job step to finish.
slurmstepd-n1: error: *** STEP 3.0 ON n1 CANCELLED AT 2026-11-21T08:18:44 ***
slurmstepd-n1: error: *** JOB 3 ON n1 CANCELLED AT 2026-11-21T08:18:59{} ***
srun: forcing job termination
"""


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ("", CANCELLED),
        (" DUE TO PREEMPTION", PREEMPTED),
        (" DUE TO TIME LIMIT", TIMEOUT),
        (" DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS", NODE),
        (" DUE TO JOB REQUEUE", REQUEUED),
        (" DUE TO SOMETHING NEW", CANCELLED),
    ],
)
def test_slurms_words_in_the_log(words: str, cause: str) -> None:
    assert log_reader.ending(LOG.format(words)) == cause


def test_a_signal_for_the_batch_script_alone_ends_nothing() -> None:
    """It has the words of scancel; what ends the job later has words for the steps alone."""
    told = LOG.format("").replace("08:18:44 ***", "08:18:44 DUE TO JOB REQUEUE ***").splitlines()
    assert log_reader.ending("\n".join([told[2], told[1]])) == REQUEUED
    assert log_reader.ending("\n".join([told[1], told[2]])) == CANCELLED


def test_a_step_that_ends_is_no_job_that_ends() -> None:
    assert log_reader.ending("\n".join(LOG.splitlines()[:2])) == ""
    assert log_reader.ending("") == ""


def test_words_on_another_job_of_the_same_log_are_not_taken() -> None:
    told = LOG.format(" DUE TO PREEMPTION")
    assert log_reader.ending(told, "3") == PREEMPTED
    assert log_reader.ending(told, "33") == log_reader.ending(told + "", "4") == ""


def test_the_last_word_counts() -> None:
    assert log_reader.ending(LOG.format(" DUE TO JOB REQUEUE") + LOG.format("")) == CANCELLED


@pytest.mark.parametrize("label", ["", " 3: "])
def test_our_launchers_words_on_a_rank_are_read(label: str) -> None:
    line = label + rank_ended(12, "n1", "SIGKILL")
    match = log_reader.BY_OURS.search(line)
    assert match and match.groups() == ("12", "n1", "SIGKILL")
