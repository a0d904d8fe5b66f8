"""submitit submits our own script, and its own command would start a rank too."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ranks
from sites import Site
from submitted import planned

from hpcddp.attempt import claim, ledger
from hpcddp.rundir import read_json
from hpcddp.submit import prepare, submission
from hpcddp.topology import Rank


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o002)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_sbatch_gets_our_script_in_a_clean_environment(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.slurm(sbatch='echo "$*" >seen; env >>seen; echo "Submitted batch job 42"')
    monkeypatch.setenv("SLURM_CPU_BIND", "quiet")
    monkeypatch.setenv("SBATCH_EXCLUSIVE", "1")
    monkeypatch.setenv("RANK", "3")
    made = planned(site)
    run = prepare.new_run(made, site.runs)
    assert submission.submit(made, run) == "42"
    call, *environ = (site.folder / "seen").read_text().splitlines()
    assert call == str(run.script)
    names = {line.partition("=")[0] for line in environ}
    assert not names & {"SLURM_CPU_BIND", "SBATCH_EXCLUSIVE", "RANK"}
    assert (read_json(run.submission) or {})["job_id"] == "42"
    assert run.log.readlink() == Path("job-42.log") and run.log.read_text() == ""
    text = run.script.read_text()
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\n" in text
    assert f"-m hpcddp.worker {run.path}" in text and "submitit" not in text
    assert stat.S_IMODE(run.submitit.stat().st_mode) & 0o022 == 0
    claim.check_owner(run)  # also where new files are the group's to write to


def test_the_two_scripts_are_the_same(site: Site) -> None:
    site.slurm()
    made = planned(site)
    run = prepare.new_run(made, site.runs)
    submission.submit(made, run)
    rendered = prepare.new_run(made, site.runs)
    text = rendered.script.read_text()
    assert run.script.read_text().replace(run.name, "X") == text.replace(rendered.name, "X")


def test_submitits_own_command_starts_a_rank(site: Site) -> None:
    """Nobody calls it but a person: submitit's files in the run say all that it needs."""
    site.slurm()
    site.job("toy", "global_batch = 4\nmax_steps = 2\n", ranks.TASK)
    made = planned(site, nodes="1", gpus=1)
    run = prepare.new_run(made, site.runs)
    submission.submit(made, run)
    assert ledger.begin(run, ledger.new_attempt("42", os.getpid()), lambda earlier: False)
    environ = {name: value for name, value in os.environ.items() if name[:6] != "SLURM_"}
    environ |= Rank(0, 1, 0, 1, 0).to_env() | {"SUBMITIT_EXECUTOR": "slurm", "SLURM_JOB_ID": "42"}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "submitit.core._submit", run.submitit],
        env=environ, cwd=made.workdir, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert [r["outcome"] for r in ranks.records(run, "end")] == ["done"]
