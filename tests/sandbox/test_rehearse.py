"""A rehearsal without its Slurm: the instants, the comparison, what is refused, what is shown."""

import json
import re
import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from ranks import make_run, one_rank
from sites import Outcome, Site

from hpcddp.attempt import ledger
from hpcddp.cli import rehearse as command
from hpcddp.errors import UserError
from hpcddp.planning.jobfile import Layer
from hpcddp.rundir import STEP, RunDir, read_json, write_json
from hpcddp.sandbox import compare, fault_times, outcome, rehearsal_sandbox, rehearse
from hpcddp.sandbox.cluster import Sandbox
from hpcddp.sandbox.fault_times import KINDS, Fault, Timeline
from hpcddp.sandbox.outcome import FaultOutcome, Report
from hpcddp.sandbox.rehearsed_run import RehearsedRun

LINE = Timeline(startup=4.0, per_step=0.05, steps=400)
EVERY = dict.fromkeys(KINDS, 2)


# --- instants


def test_the_seed_says_it_all() -> None:
    first, again = (fault_times.draw(EVERY, 7, LINE) for _ in range(2))
    assert first == again != fault_times.draw(EVERY, 8, LINE)
    assert sorted(f.kind for f in first) == sorted(k for k in KINDS for _ in range(2))


def test_whencover_the_run_from_its_start_to_its_end() -> None:
    faults = [f for seed in range(300) for f in fault_times.draw({"crash": 1}, seed, LINE)]
    starting = [f.after for f in faults if not f.step]
    steps = [f.step for f in faults if f.step]
    # 4 of 24 seconds are start-up: 50 of 300 are expected, and 6.5 is the standard deviation.
    assert 50 - 4 * 6.5 < len(starting) < 50 + 4 * 6.5
    assert all(0 <= after < LINE.startup for after in starting)
    assert min(steps) < 20 and 360 < max(steps) <= 0.95 * 400
    for low in range(0, 400, 100):
        assert any(low < step <= low + 100 for step in steps)


def test_each_fault_leaves_room_for_those_after_it() -> None:
    room = fault_times.ROOM / LINE.per_step
    for seed in range(100):
        faults = fault_times.draw(EVERY, seed, LINE)
        for left, fault in enumerate(reversed(faults)):
            assert fault.step <= 400 - left * room
        when = [(f.step, f.after) for f in faults if f.kind != "timeout"]
        assert when == sorted(when)
        steps = [f.step for f in faults if f.step]
        assert all(later - step >= room for step, later in pairwise(steps))


def test_a_time_limit_never_ends_before_a_first_step() -> None:
    for seed in range(100):
        (fault,) = fault_times.draw({"timeout": 1}, seed, LINE)
        assert fault.step >= 1
        assert fault_times.limit(0, fault, LINE) > LINE.startup + fault.step * LINE.per_step


def test_a_job_that_is_too_short_is_refused_with_the_steps_that_it_needs() -> None:
    short = Timeline(4.0, 0.01, 100)
    with pytest.raises(UserError, match=r"100 steps in 1\.0 s are too few for 18 faults") as error:
        fault_times.draw(EVERY, 0, short)
    needed = int(error.value.hint.split()[3])
    assert len(fault_times.draw(EVERY, 0, Timeline(4.0, 0.01, needed))) == 18


def test_some_faults_have_a_second_one() -> None:
    faults = fault_times.draw(EVERY, 7, LINE, two=5)
    seconds = [fault.second for fault in faults if fault.second is not None]
    assert len(seconds) == 5 and all(0 <= second < fault_times.SECOND for second in seconds)
    alone = fault_times.draw(EVERY, 7, LINE)
    assert [fault.step for fault in faults] == [fault.step for fault in alone]


def test_some_lost_nodes_return_late() -> None:
    line = Timeline(startup=4.0, per_step=0.05, steps=6000)
    faults = fault_times.draw(EVERY, 7, line, down=3)
    assert sum(fault.down for fault in faults) == 3
    assert all(fault.kind in fault_times.LOST for fault in faults if fault.down)
    for seed in range(50):  # and the run outlasts them
        late = [fault.step for fault in fault_times.draw(EVERY, seed, line, down=3) if fault.down]
        for left, step in enumerate(reversed(late), 1):
            assert (6000 - step) * line.per_step >= left * fault_times.LATE
    with pytest.raises(UserError, match=r"too few for 18 faults"):
        fault_times.draw(EVERY, 7, LINE, down=3)
    said = r"from 0 to 4, the number of nodes that --kill-node and --silent-node lose, not 5"
    with pytest.raises(UserError, match=said):
        rehearse.check({"kill-node": 3, "silent-node": 1}, 10.0, down=5)


# --- comparison


def run_of(root: Path, *attempts: list[list[dict[str, Any]]]) -> RunDir:
    """A run with a trace for each rank of each attempt, which has completed all of its steps."""
    run = RunDir(root)
    run.create()
    for number, ranks in enumerate(attempts, 1):
        run.attempt(number).path.mkdir()
        for rank, lines in enumerate(ranks):
            text = "".join(json.dumps(line) + "\n" for line in lines)
            run.attempt(number).trace(rank).write_text(text)
            run.attempt(number).step.write_bytes(STEP.pack(lines[-1]["step"], 1.0))
    return run


def steps(first: int, last: int, rank: int = 0, loss: float = 0.5) -> list[dict[str, Any]]:
    return [
        {"step": n, "epoch": 0, "ids": [2 * n + rank], "loss": loss / n}
        for n in range(first, last + 1)
    ]


def two(first: int, last: int) -> list[list[dict[str, Any]]]:
    return [steps(first, last, 0), steps(first, last, 1)]


def test_steps_that_were_taken_again_are_counted_once_each(tmp_path: Path) -> None:
    run = run_of(tmp_path / "r", two(1, 50), [], two(41, 45), two(41, 60))
    assert compare.lost(run) == {1: 10, 3: 5} and compare.repeated(run) == 0


def test_a_step_in_flight_is_not_lost(tmp_path: Path) -> None:
    """It has a line, but was never completed."""
    first = [steps(1, 49), steps(1, 50, 1)]  # of any rank
    run = run_of(tmp_path / "r", first, two(50, 60), two(59, 70), two(71, 71), two(71, 90))
    run.attempt(1).step.write_bytes(STEP.pack(49, 1.0))
    run.attempt(4).step.unlink()  # it has completed no step
    assert compare.lost(run) == {1: 0, 2: 2, 3: 0, 4: 0} and compare.repeated(run) == 2


def test_the_order_is_equal_however_a_run_was_cut(tmp_path: Path) -> None:
    reference = run_of(tmp_path / "a", two(1, 60))
    run = run_of(tmp_path / "b", two(1, 50), two(41, 45), two(46, 60))
    assert compare.difference(reference, run, 2) == ""


def test_a_rank_that_is_killed_has_no_line_of_the_step_that_others_complete(tmp_path: Path) -> None:
    reference = run_of(tmp_path / "a", two(1, 60))
    run = run_of(tmp_path / "b", [steps(1, 50), steps(1, 49, 1)], two(51, 60))
    run.attempt(1).step.write_bytes(STEP.pack(50, 1.0))
    assert compare.difference(reference, run, 2) == ""
    run.attempt(1).step.write_bytes(STEP.pack(49, 1.0))  # nobody has completed it
    assert compare.difference(reference, run, 2) == "rank 1 has no step 50"


@pytest.mark.parametrize(
    ("attempts", "word"),
    [
        ([two(1, 50), [steps(51, 60), steps(51, 60, 2)]], "other samples in step 51 of rank 1"),
        ([two(1, 50), [steps(41, 60, 0, 0.25), two(41, 60)[1]]], "loss .* in step 41 of rank 0"),
        ([two(1, 50), two(52, 60)], "rank 0 has no step 51"),
        ([two(1, 61)], "no such step in the run without faults: in step 61"),
        ([[steps(1, 60)]], "rank 1 has no step 1"),
    ],
)  # fmt: skip
def test_any_other_order_is_found(tmp_path: Path, attempts: Any, word: str) -> None:
    reference = run_of(tmp_path / "a", two(1, 60))
    difference = compare.difference(reference, run_of(tmp_path / "b", *attempts), 2)
    assert re.search(word, difference), difference


def test_without_any_trace_nothing_is_equal(tmp_path: Path) -> None:
    empty = [RunDir(tmp_path / name) for name in "ab"]
    assert compare.difference(*empty, 1) == "rank 0 recorded no steps"


def test_the_digest_is_of_weights_and_optimizer(tmp_path: Path) -> None:
    digests = []
    for name, keys in {"a": {}, "b": {}, "seed": {"seed": 1}, "decay": {"train__lr": 0.0}}.items():
        run = make_run(tmp_path / name, checkpoint__best="", **keys)
        one_rank(run)
        digests.append(compare.digest(run))
    assert digests[0] == digests[1] and digests[0].startswith("6:")
    assert len(set(digests)) == 3
    assert compare.digest(RunDir(tmp_path / "none")) == ""


# --- the job, as the sandbox can take it


def test_what_belongs_to_a_cluster_is_left_out_and_said() -> None:
    said: list[str] = []
    job = Layer().put_all(
        {"global_batch": 8, "slurm": {"account": "lab", "signal": "USR1@60"}, "cluster": "mine"},
        "job.toml",
    )
    layers = rehearsal_sandbox.sandboxed([job], {"preempt": 1}, Path("/home"), said.append)
    values = {name: v for layer in reversed(layers) for name, v in layer.values.items()}
    assert "slurm.account" not in values
    assert (values["slurm.signal"], values["global_batch"]) == ("USR1@60", 8)
    assert values["train.trace"] is True and values["cluster"].startswith("/home/")
    assert said == ["keys of a cluster, not used here: cluster, slurm.account"]


@pytest.mark.parametrize(
    ("counts", "given", "seconds"),
    [({"hang": 1}, {}, 5.0), ({"hang": 1}, {"hang_seconds": 60.0}, 60.0), ({"crash": 1}, {}, None)],
)
def test_a_hang_is_found_soon_unless_the_job_says_when(
    counts: dict[str, int], given: dict[str, float], seconds: float | None
) -> None:
    job = Layer().put_all({"train": given}, "job")
    layers = rehearsal_sandbox.sandboxed([job], counts, Path("/home"), print)
    values = {name: v for layer in reversed(layers) for name, v in layer.values.items()}
    assert values.get("train.hang_seconds") == seconds


@pytest.mark.parametrize(
    ("counts", "given", "limit"),
    [
        ({"crash": 8, "hang": 2, "preempt": 5}, {}, 30),
        ({"crash": 8}, {"crashes": 2}, 2),
        ({"preempt": 20}, {}, 3),
    ],
)
def test_its_own_faults_do_not_use_up_the_crashes_that_a_job_may_have(
    counts: dict[str, int], given: dict[str, int], limit: int
) -> None:
    job = Layer().put_all({"requeue": given}, "job")
    layers = rehearsal_sandbox.sandboxed([job], counts, Path("/home"), print)
    values = {name: v for layer in reversed(layers) for name, v in layer.values.items()}
    assert values["requeue.crashes"] == limit


# --- what is refused, before anything starts


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ([], "a rehearsal needs at least one fault"),
        (["--preempt", "-1"], "--preempt: must be at least 0, not -1"),
        (["--crash", "1", "--nodes", "1-2"], "expected a number of nodes, got the range 1-2"),
        (["--crash", "1", "--watch", "-1"], "--watch: must be at least 0, not -1"),
        (["--crash", "1", "--set", "train.nothing=1"], "train.nothing"),
    ],
)
def test_nonsense_is_a_user_error(
    site: Site, hpcddp: Callable[..., Outcome], arguments: list[str], word: str
) -> None:
    done = hpcddp("rehearse", "toy", *arguments)
    assert done.code == 2 and word in done.err and not done.out


# --- what came of it


def hit(run: RunDir, kind: str) -> tuple[RehearsedRun, Fault]:
    """A fault that hit the first of two attempts: it had saved at step 40, and come to 50."""
    for number in (1, 2):
        facts = ledger.new_attempt(str(number), 1)
        facts.number, facts.cause, facts.saved = number, kind if number == 1 else "done", 40
        write_json(run.attempt(number).facts, asdict(facts))
        run.attempt(number).step.write_bytes(STEP.pack(10 * (4 + number), 100.0 * number))
    rehearsed = RehearsedRun(Sandbox(run.path), run, 1.0, print)
    rehearsed.first_steps = {1: (1, 60.0), 2: (41, 130.0)}
    return rehearsed, Fault(kind, 50, 0.0, 0.5, attempt=1, at=50)


@pytest.mark.parametrize(("kind", "survived"), [("preempt", False), ("crash", True)])
def test_only_what_leaves_no_time_to_save_may_cost_steps(
    tmp_path: Path, kind: str, survived: bool
) -> None:
    run = run_of(tmp_path / "r", two(1, 50), two(41, 60))
    rehearsed, fault = hit(run, kind)
    (row,) = outcome.outcomes(rehearsed, [fault])
    assert (row.survived, row.steps_lost, row.seconds_lost) == (survived, 10, 30.0)
    assert row.reason == ("" if survived else "10 steps lost needlessly")


def test_what_could_not_be_played_was_not_survived(tmp_path: Path) -> None:
    run = run_of(tmp_path / "r", two(1, 50), two(41, 60))
    rehearsed, _ = hit(run, "crash")
    (row,) = outcome.outcomes(rehearsed, [Fault("hang", 55, 0.0, 0.5)])
    assert not row.survived and row.reason == "the run ended before this fault"


def test_steps_after_which_nothing_trained_are_not_counted_as_kept(tmp_path: Path) -> None:
    run = run_of(tmp_path / "r", two(1, 50), [])
    rehearsed, fault = hit(run, "crash")
    facts = read_json(run.attempt(2).facts)
    write_json(run.attempt(2).facts, facts | {"cause": "crash"})
    rehearsed.first_steps.pop(2)
    (row,) = outcome.outcomes(rehearsed, [fault])
    assert (row.survived, row.steps_lost, row.seconds_lost) == (False, None, None)


def test_a_limit_that_the_start_up_used_up_has_come(tmp_path: Path) -> None:
    """Else it would be waited for in a life that has no limit."""
    run = run_of(tmp_path / "r", two(1, 50), [])
    rehearsed, _ = hit(run, "preempt")
    run.attempt(2).step.unlink()
    fault, now = Fault("timeout", 50, 0.0, 0.5), time.time()
    for deadline, due in ((None, False), (now + 6e5, False), (now + 60, False), (now + 1, True)):
        facts = ledger.new_attempt("2", 1)
        facts.number, facts.began, facts.deadline = 2, now - 30, deadline
        write_json(run.attempt(2).facts, asdict(facts))
        assert rehearse._due(rehearsed, fault) == due


# --- what is shown


def report(**changes: Any) -> Report:
    row = FaultOutcome("crash", 217, 3, "crash", survived=True, steps_lost=9, seconds_lost=8.25)
    good = Report("toy", 7, 2, 2, 400, [row], state="COMPLETED", steps_lost=9,
                  weights_equal=True, order_equal=True)  # fmt: skip
    for name, value in changes.items():
        setattr(good, name, value)
    return good


def test_the_table() -> None:
    lines = command.table(report()).splitlines()
    assert lines[1].split() == ["crash", "217", "3", "crash", "yes", "9", "8.2"]
    assert "weights equal  yes" in lines and "seed           7" in lines
    assert "steps lost     9 of 400" in lines


def test_lost_steps_of_a_run_that_failed_are_unknown() -> None:
    row = FaultOutcome("crash", 217, 3, "crash", survived=False, steps_lost=None, seconds_lost=None)
    lines = command.table(report(state="FAILED", steps_lost=None, faults=[row])).splitlines()
    assert lines[1].split() == ["crash", "217", "3", "crash", "NO", "-", "-"]
    assert "steps lost     unknown" in lines


@pytest.mark.parametrize(
    "bad",
    [
        {"weights_equal": False},
        {"order_equal": False},
        {"steps_needless": 1},
        {"state": "FAILED"},
        {
            "faults": [
                FaultOutcome("hang", 0, 0, "", survived=False, steps_lost=0, seconds_lost=None)
            ]
        },
    ],
)
def test_anything_that_went_wrong_fails_the_whole(bad: dict[str, Any]) -> None:
    assert report().passed
    assert not report(**bad).passed
