"""What an earlier run of a job took, by its newest attempt with figures."""

from dataclasses import asdict

from earlier import earlier_run
from sites import Site

from hpcddp.attempt import ledger
from hpcddp.planning import earlier_runs
from hpcddp.planning.earlier_runs import Measured
from hpcddp.rundir import write_json


def test_a_lead_is_what_sbatch_takes() -> None:
    assert Measured(1e6, 1e6, 0).lead == 65535


def test_of_a_run_the_newest_attempt_with_figures_counts_without_its_first_step(
    site: Site,
) -> None:
    run = earlier_run(site, save=1, step=0.1, run="toy-1")
    earlier_run(site, save=9, step=0.4, start=33.0, number=2, run="toy-1")
    empty = ledger.life("5", 1)
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
