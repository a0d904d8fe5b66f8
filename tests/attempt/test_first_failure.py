"""Why a program failed, as its log tells it."""

import time
from dataclasses import asdict
from pathlib import Path

import pytest
from lives import MISTAKE, attempted, failing
from made import made_run
from sites import Site, record_run

from hpcddp import record
from hpcddp.attempt import first_failure, ledger
from hpcddp.attempt.nodes import bad_nodes
from hpcddp.observe import history
from hpcddp.rundir import write_json

GONE = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer"


def traceback(rank: int, end: str, mark: str = "") -> str:
    lines = [
        "Traceback (most recent call last):",
        '  File "train.py", line 3',
        "    x = 1",
        "",
        end,
    ]
    return "".join(f"{rank:2}: {mark}{line}\n" for line in lines)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", ""),
        (traceback(0, GONE) + traceback(1, "ValueError: boom", "[rank1]: "),
         "rank 1: ValueError: boom"),
        (traceback(0, GONE, "[rank0]: "), ""),
        (traceback(3, "KeyboardInterrupt") + traceback(2, "own.Error: x"),
         "rank 3: KeyboardInterrupt"),
        # The second one is what it ended with; the first one was met on the way.
        (traceback(0, "KeyError: 'x'") + traceback(0, "OSError: full"), "rank 0: OSError: full"),
        # It printed one, and went on.
        (traceback(0, "KeyError: 'x'") + " 0: step\n" * 10, ""),
        (traceback(0, "KeyError: 'x'") + " 1: step\n" * 10, "rank 0: KeyError: 'x'"),
        (" 0: ValueError: is only a line\n", ""),
    ],
)  # fmt: skip
def test_the_exception_that_ended_the_first_rank(text: str, told: str) -> None:
    assert str(first_failure.raised(text) or "") == told


def test_a_rank_that_gloo_ended() -> None:
    text = " 0: step 3\n11: terminate called without an active exception\n"
    assert str(first_failure.aborted(text)).startswith("rank 11 was ended by a thread of gloo")
    assert first_failure.aborted(" 0: why terminate called without an active exception\n") is None


SRUN = "srun: error: n2: tasks 3,5-6: Killed\nsrun: error: n1: task 0: Killed\n"
OURS = "hpcddp: rank 3 on n2 was ended by SIGKILL\n"
KILLED = (3, "n2", "rank 3 on n2 was killed: out of memory?")
FULL = (3, "n2", "rank 3 on n2 was ended by SIGBUS: is a disk or /dev/shm full?")


@pytest.mark.parametrize(
    ("launcher", "log", "told"),
    [
        ("srun", traceback(0, GONE) + SRUN, KILLED),
        ("spawn", traceback(0, GONE) + OURS, KILLED),
        # There a task of srun is a node's, and ended as a consequence.
        ("fork", traceback(0, GONE) + OURS + "srun: error: n1: task 0: Killed\n", KILLED),
        ("torchrun", "1: hpcddp: rank 3 on n2 was ended by SIGKILL\n", KILLED),
        ("srun", traceback(0, GONE) + SRUN.replace("Killed", "Bus error (core dumped)"), FULL),
        ("spawn", traceback(0, GONE) + OURS.replace("SIGKILL", "SIGBUS"), FULL),
        ("srun", traceback(0, GONE) + "srun: error: n2: task 3: Exited with exit code 7\n",
         (3, "n2", "rank 3 on n2 ended with exit code 7")),
        ("srun", traceback(0, GONE) + traceback(3, "ValueError: boom"),
         (3, "", "rank 3: ValueError: boom")),
        # It ends the others then, which are not to blame.
        ("srun", "srun: error: Node failure on n[2-3]\nsrun: error: n1: tasks 0-1: Killed\n",
         (None, "n[2-3]", "n[2-3] failed")),
        ("srun", "srun: error: Node failure on n[2-\n" + SRUN, KILLED),
        ("srun", traceback(3, "ValueError: boom")
         + "srun: error: n2: task 3: Exited with exit code 1\n"
         + "srun: error: n1: tasks 0-1: Killed\n", (3, "", "rank 3: ValueError: boom")),
        ("srun", traceback(0, GONE) + "srun: error: n1: task 0: Exited with exit code 1\n" + SRUN,
         KILLED),
        ("srun", traceback(0, GONE) + "3: no\nsrun: error: n1: task 1: Exited with exit code 1\n"
         + "srun: error: n2: task 3: Exited with exit code 7\nsrun: error: n1: task 0: Killed\n",
         (1, "n1", "rank 1 on n1 ended with exit code 1")),
        ("spawn", traceback(3, "ValueError: boom") + OURS.replace("rank 3", "rank 1"),
         (3, "", "rank 3: ValueError: boom")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("lost", [True, False])
def test_who_failed_first_where_no_rank_could_tell(
    tmp_path: Path, launcher: str, log: str, told: tuple[int | None, str, str], lost: bool
) -> None:
    """The one that lost it has a record of its own, or has none."""
    run = made_run(tmp_path, cause="crash", last=300)
    record_run(run, (2, 2), 2, launcher=launcher)
    run.attempt(3).log.write_text(log)
    if lost:
        peer = {"rank": 0, "host": "n1", "type": "RuntimeError", "kind": "peer", "message": GONE}
        write_json(run.attempt(3).error, peer)
    row = history.summaries(run)[-1]
    assert row.error and (row.error["rank"], row.error["host"]) == told[:2]
    assert row.error["traceback"].partition(";")[0] == told[2]
    last = ledger.read(run.attempt(3))
    assert last and first_failure.of(run, last).partition(";")[0] == told[2]
    assert bad_nodes.bad_host(run, last, record.read(run)) == told[1]


def test_a_record_of_a_cause_is_more_than_what_the_log_says(tmp_path: Path) -> None:
    run = made_run(tmp_path, cause="crash", last=300)
    own = {"rank": 1, "host": "n1", "type": "ValueError", "kind": "crash", "message": "boom"}
    write_json(run.attempt(3).error, own)
    run.attempt(3).log.write_text(SRUN)
    assert history.summaries(run)[-1].error == own


SAME = "".join(f"{rank} 4 ImportError: no x\n" for rank in range(4))


@pytest.mark.parametrize(
    ("failures", "met", "found"),
    [
        (SAME, False, "mistake"),
        (SAME, True, "crash"),  # an attempt before has met: it is no mistake any more
        (SAME.replace("3 4 Import", "3 4 OS"), False, "crash"),
        ("1 4 ImportError: no x\n", False, "crash"),  # the others did well
        ("", False, "crash"),
    ],
)
def test_what_all_ranks_fail_of_before_any_progress_is_a_mistake(
    site: Site, failures: str, met: bool, found: str
) -> None:
    run, mine = failing(site)
    if met:
        run.attempt(1).metrics.write_text('{"event": "ranks"}\n')
        mine = attempted(run, 2)
    run.attempt(mine.number).failures.write_text(failures)
    assert first_failure.kind(run, mine, record.read(run), MISTAKE, 1) == found
    write_json(run.submission, {"submitted": time.time() + 1})  # a person has resumed it since
    assert first_failure.kind(run, mine, record.read(run), MISTAKE, 1) == (
        "mistake" if failures == SAME else "crash"
    )


@pytest.mark.parametrize(("before", "found"), [(False, "mistake"), (True, "crash")])
def test_a_mistake_of_all_ranks_may_follow_their_rendezvous(
    site: Site, before: bool, found: str
) -> None:
    """hpcddp.attach refuses a model after the script has started its process group."""
    run, mine = failing(site, command=["train.py"])
    if before:
        run.attempt(1).met.touch()
        mine = attempted(run, 2)
    run.attempt(mine.number).met.touch()
    error = {**MISTAKE, "rank": None}
    assert first_failure.kind(run, mine, record.read(run), error, 1) == found


@pytest.mark.parametrize(
    ("log", "met", "found"),
    [
        ("0: ImportError: no x\n3: ImportError: no x\n", False, "mistake"),
        ("0: ImportError: no x\n3: ImportError: no x\n", True, ""),
        ("0: ImportError: no x\n", False, ""),  # its node's, it may be
        ("0: NameError: x\n3: NameError: y\n", False, ""),
        ("0: train.py: No such file or directory\n2: train.py: No such file or directory\n",
         False, "mistake"),
        ("0: OSError: [Errno 5] Input/output error\n2: OSError: [Errno 5] Input/output error\n",
         False, ""),
        ("0: step 3\n2: step 3\n", False, ""),
        ("", False, ""),
    ],
)  # fmt: skip
def test_a_program_that_ends_with_the_same_words_on_all_nodes_was_never_right(
    site: Site, log: str, met: bool, found: str
) -> None:
    run, mine = failing(site, command=["python", "train.py"])
    run.attempt(1).log.write_text(log)
    if met:
        run.attempt(1).met.touch()
    assert first_failure.kind(run, mine, record.read(run), {}, 1) == found
    assert first_failure.kind(run, mine, record.read(run), {}, 0) == ""


def test_a_program_that_fails_twice_with_the_same_words_was_never_right(site: Site) -> None:
    """srun ends the other nodes' ranks as soon as one has failed: they say nothing."""
    run, first = failing(site, command=["python", "train.py"])
    run.attempt(1).log.write_text("0: ImportError: no x\n")
    assert first_failure.kind(run, first, record.read(run), {}, 1) == ""
    first.cause = "crash"
    write_json(run.attempt(1).facts, asdict(first))
    second = attempted(run, 2)
    for words, found in (
        ("3: ImportError: no x\n", "mistake"),
        ("3: ImportError: no y\n", ""),
        ("0: ImportError: no x\n", ""),  # of the same node, it may be, which lacks it
    ):
        run.attempt(2).log.write_text(words)
        assert first_failure.kind(run, second, record.read(run), {}, 1) == found


def test_ranks_that_met_before_make_no_mistake_by_meeting_late(site: Site) -> None:
    run, _ = failing(site, command=["python", "train.py"])
    late = MISTAKE | {"rank": None, "message": "no process group after 9 s"}
    second = attempted(run, 2)
    assert first_failure.kind(run, second, record.read(run), late, 143) == "mistake"
    run.attempt(1).met.touch()
    assert first_failure.kind(run, second, record.read(run), late, 143) == "crash"
