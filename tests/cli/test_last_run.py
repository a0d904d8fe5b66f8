"""`last` is the run that was submitted last."""

import json
import time
from collections.abc import Callable

from sites import Outcome, Site

from hpcddp.attempt import ledger
from hpcddp.attempt.ledger import Attempt
from hpcddp.rundir import RunDir

Command = Callable[..., Outcome]


def submitted(hpcddp: Command, *arguments: str) -> str:
    return str(json.loads(hpcddp("submit", "--json", *arguments).out)["run"])


def test_last_is_the_run_that_was_submitted_last(site: Site, hpcddp: Command) -> None:
    """A run that was rendered afterwards is not."""
    site.slurm(squeue="exit 0", sacct="exit 0")
    submitted(hpcddp, "-J", "early")
    name = submitted(hpcddp, "-J", "late")
    assert hpcddp("render", "-J", "rendered").code == 0
    assert json.loads(hpcddp("status", "last", "--json").out)["run"] == name
    assert json.loads(hpcddp("status", "--json").out)["run"] == name
    assert f"{name}: " in hpcddp("logs", "--attempt", "1").err
    listed = json.loads(hpcddp("ls", "--json").out)["runs"]
    assert [row["run"].partition("-")[0] for row in listed] == ["rendered", "late", "early"]


def test_a_script_that_was_submitted_late_is_the_last_run(site: Site, hpcddp: Command) -> None:
    """Plain sbatch leaves no time of submission: its first attempt tells."""
    site.slurm(squeue="exit 0", sacct="exit 0")
    lines = hpcddp("render", "-J", "rendered").err.splitlines()
    folder = next(line.split()[1] for line in lines if line.startswith("folder "))
    name = submitted(hpcddp, "-J", "other")
    assert json.loads(hpcddp("status", "--json").out)["run"] == name
    began(RunDir(folder), time.time() + 1)
    assert json.loads(hpcddp("status", "--json").out)["run"] == RunDir(folder).name


def began(run: RunDir, when: float) -> None:
    """Begin an attempt by a job of Slurm's."""
    ledger.begin(run, Attempt(0, "7", "n1", 1, "1", True, "n1", when, said_id="7"),
                 lambda earlier: False)  # fmt: skip


def test_a_run_that_was_only_rendered_is_found_by_its_name(site: Site, hpcddp: Command) -> None:
    site.slurm()
    assert hpcddp("render", "-J", "rendered").code == 0
    assert "RENDERED" in hpcddp("status", "rendered").out
    done = hpcddp("status")
    assert done.code == 2 and "hpcddp submit" in done.err
