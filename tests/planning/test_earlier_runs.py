"""What an earlier run of a job took, by its newest attempt with figures."""

import os
from dataclasses import asdict
from typing import Any

import pytest
from earlier import earlier_run
from sites import Site, record_run

from hpcddp.attempt import ledger
from hpcddp.planning import earlier_runs
from hpcddp.planning.earlier_runs import Measured
from hpcddp.rundir import RunDir, write_json
from hpcddp.spec import KEYS, to_dict


def test_a_lead_is_what_sbatch_takes() -> None:
    assert Measured(1e6, 1e6, 0).lead == 65535


def test_of_a_run_the_newest_attempt_with_figures_counts_without_its_first_step(
    site: Site,
) -> None:
    run = earlier_run(site, save=1, step=0.1, run="toy-1")
    earlier_run(site, save=9, step=0.4, start=33.0, number=2, run="toy-1")
    empty = ledger.new_attempt("5", 1)
    empty.number = 3
    run.attempt(3).path.mkdir()
    write_json(run.attempt(3).facts, asdict(empty))
    run.attempt(3).metrics.write_text('{"event": "train", "st')  # cut by a crash
    assert earlier_runs.measured(run) == Measured(0.4, 9.0, 33.0, "toy-1")


def test_a_run_without_figures_or_damaged_has_nothing_to_say(site: Site) -> None:
    run = earlier_run(site, save=1, run="toy-1")
    run.attempt(1).metrics.write_text('{"event": "train", "step": 1, "time": 5, "step_s": "x"}\n')
    assert earlier_runs.measured(run) is None
    run.attempt(1).facts.write_text("[")
    assert earlier_runs.measured(run) is None


def test_a_job_goes_by_the_newest_of_its_own_runs_with_figures(site: Site) -> None:
    earlier_run(site, save=4, run="toy-1")
    newest = earlier_run(site, save=6, run="toy-2")
    earlier_run(site, save=8, name="toy-b", run="toy-b-1")  # a job whose name begins alike
    earlier_run(site, save=9, backend="local", run="toy-3")
    earlier_run(site, save=9, run="toy-4").attempt(1).metrics.unlink()
    earlier_run(site, save=9, run="toy-5").job.write_text("[")
    assert earlier_runs.of_job("toy", "slurm", site.runs) == earlier_runs.measured(newest)
    assert earlier_runs.of_job("other", "slurm", site.runs) is None
    assert earlier_runs.of_job("toy", "local", site.runs) is None  # no time ends there


def command_run(
    site: Site, met: float | None = 400.0, run: str = "toy-1", number: int = 1, **facts: Any
) -> RunDir:
    """An earlier run of a command that records nothing itself.

    Args:
        met: seconds from the start of its attempt until its ranks had met; None for never.
        facts: of its record.
    """
    folder = earlier_run(site, save=1, run=run, number=number)
    spec = to_dict(KEYS.build({"name": "toy", "command": ["python", "train.py"]}))
    given = {"nodes": (2, 2), "gpus": 4, "spec": spec, "cluster": "slurm"} | facts
    record_run(folder, **given)
    attempt = folder.attempt(number)
    attempt.metrics.unlink()
    if met is not None:
        attempt.met.touch()
        os.utime(attempt.met, (1000.0 + met, 1000.0 + met))  # it began at 1000
    return folder


def test_a_command_without_records_has_a_start_until_its_ranks_met(site: Site) -> None:
    run = command_run(site)
    assert earlier_runs.measured(run) == Measured(0.0, 0.0, 400.0, "toy-1")
    assert earlier_runs.of_job("toy", "slurm", site.runs) == Measured(0.0, 0.0, 400.0, "toy-1")
    command_run(site, met=None, number=2)
    assert earlier_runs.measured(run) == Measured(0.0, 0.0, 400.0, "toy-1")
    command_run(site, met=200.0, number=3)
    assert earlier_runs.measured(run) == Measured(0.0, 0.0, 200.0, "toy-1")


@pytest.mark.parametrize(
    "facts",
    [
        {"nodes": (1, 1), "gpus": 1},  # `met` comes after a fixed time
        {"launcher": "torchrun"},
        {"spec": {"name": "toy", "command": ["python", "-m", "hpcddp.dask", "train.py"]}},
        {"spec": {"name": "toy", "task": "toy.py"}},
    ],
)
def test_where_no_rendezvous_can_be_seen_the_start_is_unknown(
    site: Site, facts: dict[str, Any]
) -> None:
    assert earlier_runs.measured(command_run(site, **facts)) is None


def test_times_of_steps_and_saves_come_before_a_newer_start(site: Site) -> None:
    whole = earlier_runs.measured(earlier_run(site, save=4, run="toy-1"))
    command_run(site, run="toy-2")
    assert earlier_runs.of_job("toy", "slurm", site.runs) == whole
    attempts = earlier_run(site, save=4, start=33.0, run="toy-3")
    records = attempts.attempt(1).metrics.read_text()
    command_run(site, run="toy-3", number=2)
    attempts.attempt(1).metrics.write_text(records)
    assert earlier_runs.measured(attempts) == Measured(1.0, 4.0, 33.0, "toy-3")


def test_a_start_alone_changes_no_lead() -> None:
    assert Measured(0.0, 0.0, 400.0).lead == earlier_runs.LEAD
    assert Measured(0.0, 20.0, 400.0).lead == 45
