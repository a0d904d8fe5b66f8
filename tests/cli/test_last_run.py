"""`last` is the run that was submitted last."""

import json
from collections.abc import Callable

from sites import Outcome, Site

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


def test_a_run_that_was_only_rendered_is_found_by_its_name(site: Site, hpcddp: Command) -> None:
    site.slurm()
    assert hpcddp("render", "-J", "rendered").code == 0
    assert "RENDERED" in hpcddp("status", "rendered").out
    done = hpcddp("status")
    assert done.code == 2 and "hpcddp submit" in done.err
