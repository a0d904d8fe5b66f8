import json
import subprocess
from collections.abc import Callable

import pytest
from sites import COMMAND, Outcome, Site

Command = Callable[..., Outcome]


def test_a_check_up_of_two_ranks_on_this_machine(site: Site, command: Command) -> None:
    done = command("doctor", "--cluster", "local", "--procs", "2")
    assert done.code == 0, done.text
    assert "Slurm     not found\n" in done.out and "GFLOP/s for each of 2 ranks\n" in done.out
    assert "ALL-REDUCE" in done.out and "BUS BANDWIDTH" in done.out
    assert "note: checking 1 node, 2 ranks each: job " in done.err
    again = command("doctor", "--results", "last", "--json")
    facts = json.loads(again.out)
    assert again.code == 0 and len(facts["nodes"]["ranks"]) == 2 and facts["here"] is None
    assert all(row["visible"] is not None for row in facts["nodes"]["ranks"])


def test_here_alone_submits_nothing(site: Site, command: Command) -> None:
    done = command("doctor", "--here")
    assert done.code == 0 and "torch     2." in done.out
    assert not site.runs.exists()


def test_a_low_limit_on_open_files_is_found(site: Site) -> None:
    done = subprocess.run(
        ["/bin/bash", "-c", f"ulimit -n 256; exec {COMMAND} doctor --here"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert "warning: here: a process may open 256 files\n" in done.stdout
    assert "ulimit -n 4096" in done.stdout and done.returncode == 0


def test_ranks_that_leave_no_results_are_an_error_with_the_way_on(
    site: Site, command: Command
) -> None:
    site.write("sitecustomize.py", "import sys; sys.modules['torch'] = None")
    done = command("doctor", "--cluster", "local", "--procs", "1", PYTHONPATH=str(site.folder))
    assert done.code == 1, done.text
    assert "its ranks have written no results" in done.err and "hpcddp why doctor-" in done.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--results", "none"], "no run"),
        (["--nodes", "0", "--cluster", "local"], "less than 1 node"),
        (["--strategy", "ddp"], "`doctor` has a job of its own"),
        (["--here", "--results", "last"], "--here: conflicts with --results"),
        (["--here", "-N", "2"], "--here: conflicts with --nodes"),
    ],
)
def test_a_mistake_is_refused(site: Site, hpcddp: Command, words: list[str], message: str) -> None:
    done = hpcddp("doctor", *words)
    assert done.code in (1, 2) and message in done.err and "Traceback" not in done.err
    assert not site.runs.exists()
