"""What a run of an older version still finds: its launchers' modules, and their facts."""

import json
import subprocess
import sys

import pytest
from sites import Site, record_run

from hpcddp import record
from hpcddp.attempt import launch_facts
from hpcddp.attempt.rendezvous import free_port
from hpcddp.launch.launchers import LAUNCHERS, Launcher
from hpcddp.rundir import RunDir
from hpcddp.topology import Rank

SAYS = [sys.executable, "says.py"]
SPAWN = ["hpcddp.spawn", "--no-label", "1", "1"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*SPAWN, *SAYS], "rank 0"),
        (["hpcddp.fork", "1", *SAYS], "0: rank 0"),
        (["hpcddp.agent", "1", *SAYS], "0: rank 0"),
        (["hpcddp.store", sys.executable, "-m", *SPAWN, *SAYS], "rank 0"),
    ],
    ids=["spawn", "fork", "agent", "store"],
)
def test_the_modules(site: Site, words: list[str], said: str) -> None:
    (site.folder / "says.py").write_text("import os\nprint('rank', os.environ['RANK'])\n")
    environ = Rank(0, 1, 0, 1, 0).to_env() | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "HPCDDP_ATTEMPT": "1",
        "HPCDDP_RUN_DIR": str(site.folder), "PATH": str(site.bin),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-P", "-m", *words],
        env=environ, cwd=site.folder, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, said), done.stderr


@pytest.mark.parametrize("row", LAUNCHERS.values(), ids=lambda row: row.name)
def test_job_json_says_what_older_versions_do_not_know_of_a_launcher(
    site: Site, row: Launcher
) -> None:
    run = RunDir(site.runs / "toy")
    run.path.mkdir(parents=True)
    record_run(run, launcher=row.name, launch=launch_facts.to_say(row.name, row.facts))
    assert "launch" not in json.loads(run.job.read_text())  # they can read it
    assert launch_facts.of(row.name, record.read(run).launch) == row.facts


def test_the_facts_of_a_new_launcher_are_in_job_json(site: Site) -> None:
    run = RunDir(site.runs / "toy")
    run.path.mkdir(parents=True)
    record_run(run, launcher="another", launch=launch_facts.to_say("another", {"hides": True}))
    assert launch_facts.of("another", record.read(run).launch) == {"hides": True}
