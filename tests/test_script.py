"""The rendered script itself, run by bash with a small srun."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import NASTY, Site

from hpcddp import ledger, prepare
from hpcddp.jobfile import Layer
from hpcddp.rundir import RunDir

# A controller whose job runs, and which notes what it was asked.
SCONTROL = """
asked=${0%/*}/asked
case "$*" in
  *config*) echo 'ProctrackType = proctrack/linuxproc' ;;
  requeue*) echo requeue >>"$asked" ;;
  *job*)
    grep -qs requeue "$asked" && state=PENDING || echo show >>"$asked"
    echo "JobState=${state:-RUNNING} Restarts=0 PreemptTime=None" ;;
esac
"""


@pytest.fixture
def script(site: Site, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunDir]:
    """Renders into a run dir, and looks like a batch job of two nodes."""
    for name, value in {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[3-4]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPU_BIND": "none",
        "LOCAL_RANK": "9",
        "OMPI_COMM_WORLD_RANK": "9",
    }.items():
        monkeypatch.setenv(name, value)

    def make(*pairs: tuple[str, Any], root: Path = site.runs, srun: str = "exit 0") -> RunDir:
        flags = Layer()
        for name, value in (("nodes", "2"), ("gpus", 4), *pairs):
            flags.put(name, value, "--set")
        site.program("srun", srun)
        site.program("scontrol", SCONTROL)
        return prepare.new_run(site.plan(flags), root)

    return make


def start(run: RunDir) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", run.script], capture_output=True, text=True, check=False)


SEE = 'printf "%s\\0" "$@" >"$HPCDDP_RUN_DIR/arguments"; env -0 >"$HPCDDP_RUN_DIR/environ"'


def test_values_reach_srun_byte_for_byte_and_nothing_of_them_runs(
    site: Site, script: Callable[..., RunDir]
) -> None:
    pairs = [(f"env.V{i}", value) for i, value in enumerate(NASTY)]
    pairs += [("slurm.comment", "; touch x"), ("slurm.wckey", "`touch x`$(touch x)")]
    run = script(*pairs, root=site.folder / "r $(touch x);'\"%`touch x`é", srun=SEE)
    before = sorted(site.folder.iterdir())
    done = start(run)
    assert done.returncode == 0, done.stderr
    assert sorted(site.folder.iterdir()) == before
    words = (run.path / "arguments").read_text().split("\0")[:-1]
    assert words[-5:] == [sys.executable, "-P", "-m", "hpcddp.worker", str(run.path)]
    assert {"--nodes=2", "--ntasks=8", "--ntasks-per-node=4", "--distribution=block"} < set(words)
    environ = dict(
        line.split("=", 1) for line in (run.path / "environ").read_text().split("\0")[:-1]
    )
    assert [environ[f"V{i}"] for i in range(len(NASTY))] == NASTY
    assert environ["MASTER_ADDR"] == "n3"
    assert environ["MASTER_PORT"].isdigit() and environ["HPCDDP_ATTEMPT"] == "1"
    assert "LOCAL_RANK" not in environ and "OMPI_COMM_WORLD_RANK" not in environ


@pytest.mark.parametrize(
    ("code", "left", "cause", "asked"),
    [
        (0, 0, "done", ""),
        (85, 0, "signalled", "show show requeue"),
        (3, 0, "crash", "show show requeue"),
    ],
)
def test_the_script_leaves_with_the_jobs_code(
    site: Site, script: Callable[..., RunDir], code: int, left: int, cause: str, asked: str
) -> None:
    run = script(srun=f"echo from srun; exit {code}")
    assert start(run).returncode == left
    found = ledger.last(run)
    assert found and (found.cause, found.exit_code) == (cause, code)
    assert "from srun\n" in run.log.read_text()
    assert (site.bin / "asked").read_text().split() == ["show", *asked.split()]


def test_a_term_does_not_end_the_script_before_its_ranks(script: Callable[..., RunDir]) -> None:
    """Slurm's TERM comes to all processes of a job; the ranks save first."""
    run = script(
        srun="trap 'sleep 0.3; exit 85' TERM; echo ready >&2; while :; do sleep 0.05; done"
    )
    process = subprocess.Popen(["bash", run.script], start_new_session=True)
    try:
        while not run.log.exists() or "ready" not in run.log.read_text():
            assert process.poll() is None
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found = ledger.last(run)
    assert found and found.cause == "signalled"


def test_the_same_script_continues_a_run_that_ended(script: Callable[..., RunDir]) -> None:
    run = script(srun="exit 0")
    assert start(run).returncode == start(run).returncode == 0
    assert [a.number for a in ledger.attempts(run)] == [1, 2]


def test_a_run_that_others_can_write_to_is_not_started(script: Callable[..., RunDir]) -> None:
    run = script(srun='touch "$HPCDDP_RUN_DIR/started"')
    run.path.chmod(0o770)
    done = start(run)
    assert done.returncode == 1
    assert "others can write to it" in done.stderr
    assert ledger.attempts(run) == [] and not (run.path / "started").exists()


def test_modules_are_loaded_where_a_profile_names_them(
    site: Site, script: Callable[..., RunDir]
) -> None:
    site.profile("mine", "modules = ['cuda 12', 'nccl']")
    site.write("init.sh", 'module() { : "$UNSET_ON_PURPOSE"; printf "<%s>" "$@" >>modules; }\n')
    run = script(("cluster", "mine"))
    environ = {**os.environ, "BASH_ENV": "init.sh"}
    subprocess.run(["bash", run.script], env=environ, check=True)
    assert (site.folder / "modules").read_text() == "<purge><load><cuda 12><nccl>"


@pytest.mark.parametrize(("request_", "asked"), [(False, "show show requeue"), (True, "show")])
def test_the_last_resort_needs_no_python(
    site: Site, script: Callable[..., RunDir], request_: bool, asked: str
) -> None:
    """Every Python is gone when the ranks leave. What a person asked to end does not come back."""
    python = site.folder / "python"
    python.symlink_to(sys.executable)
    more = '; : >"$HPCDDP_RUN_DIR/request.json"' if request_ else ""
    site.program("rm", '/bin/rm "$@"')
    run = script(srun=f"rm {python}{more}; exit 85")
    lines = run.script.read_text().splitlines()
    run.script.write_text(
        "\n".join(
            f"readonly PYTHON={python}" if x.startswith("readonly PYTHON=") else x for x in lines
        )
    )
    assert start(run).returncode == 85
    assert (site.bin / "asked").read_text().split() == asked.split()
