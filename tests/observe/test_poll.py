"""What is known of runs that are asked over and over: what Slurm said holds until it does not."""

import os
import time
from pathlib import Path

import pytest
from made import made_run
from sites import Site

from hpcddp.attempt import ledger
from hpcddp.errors import RunError
from hpcddp.observe.poll import SlurmStates, StatusPoll
from hpcddp.rundir import RunDir
from hpcddp.submit import status

AWAY = "echo 'squeue: error: Unable to contact slurm' >&2; exit 1"


def working(site: Site, name: str = "a-1") -> RunDir:
    site.runs.mkdir(exist_ok=True)
    return made_run(site.runs, name, ends=(), steps=20, last=10, cause=None)


def answers(site: Site, text: str) -> Path:
    """Put a squeue in place; returns the file with a line for each of its calls."""
    calls = site.folder / "asked"
    site.slurm(squeue=f'echo "$*" >> {calls}; {text}')
    return calls


def row(state: str, name: str) -> str:
    return f"echo '17|{state}|Priority|2030-01-01T10:00:00|x|n7||{name}'"


def test_a_word_holds_until_the_folder_tells_something_new(site: Site) -> None:
    run = working(site)
    calls = answers(site, row("SUSPENDED", "a-1"))
    poll = StatusPoll(run)
    for _ in range(3):
        state = poll.look()
        assert (state.state, state.reason, state.hosts) == ("SUSPENDED", "Priority", "n7")
    assert len(calls.read_text().splitlines()) == 1 and "--name=a-1" in calls.read_text()
    ledger.end(run, 1, 0, "done")
    assert poll.look().state == "COMPLETED"


def test_who_looks_aside_does_not_wait_for_slurm(site: Site) -> None:
    run = working(site)
    gate = site.folder / "gate"
    os.mkfifo(gate)
    answers(site, f"read -r < {gate}; {row('SUSPENDED', 'a-1')}")
    poll = StatusPoll(run, aside=True)
    assert poll.look().state == poll.look().state == "RUNNING"
    gate.write_text("now\n")
    until = time.monotonic() + 20
    while poll.look().state == "RUNNING" and time.monotonic() < until:
        time.sleep(0.02)
    assert poll.look().state == "SUSPENDED"


def test_a_slurm_that_is_away_is_asked_less_and_less(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, now = working(site), [0.0]
    calls = answers(site, AWAY)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    poll, when = StatusPoll(run), list[float]()
    while now[0] < 1000:
        before = len(calls.read_text().splitlines()) if calls.exists() else 0
        state = poll.look()
        assert (state.state, state.stale) == ("RUNNING", True)
        assert "Unable to contact" in state.reason
        if len(calls.read_text().splitlines()) > before:
            when.append(now[0])
        now[0] += 10
    assert when == [0, 30, 90, 210, 450, 750]


def test_many_runs_are_one_question(site: Site) -> None:
    runs = [working(site, name) for name in ("a-1", "b-1")]
    calls = answers(site, row("SUSPENDED", "b-1"))
    asked = SlurmStates(aside=False)
    asked.ask(runs)
    states = [asked.of(run, status.known(run)).state for run in runs]
    assert states == ["LOST", "SUSPENDED"] and len(calls.read_text().splitlines()) == 1


def test_a_run_that_goes_away_says_so(site: Site) -> None:
    run = working(site)
    answers(site, row("RUNNING", "a-1"))
    poll = StatusPoll(run)
    assert poll.look().state == "RUNNING"
    run.job.write_text("{")
    with pytest.raises(RunError, match="is damaged"):
        poll.look()
