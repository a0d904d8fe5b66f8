"""A run that an older version submitted: its script, its host.pyz and what submitit pickled lie in
older_run/, as they were before the modules moved into rooms."""

import pickle
import sys
from pathlib import Path

from hpcddp.rundir import RunDir

from .desk import Desk, no_job_is_left
from .test_survive import lost

OLDER = Path(__file__).with_name("older_run")
TEMPLATES = Path(__file__).parents[2] / "templates"
NAME = "toy-20261123-1348-b019"


def unpacked(folder: Path) -> RunDir:
    """The run among those of this folder, with its paths."""
    run = RunDir(folder / "runs" / NAME)
    run.submitit.mkdir(parents=True, mode=0o700)
    run.attempts.mkdir()
    values = {"@RUN@": run.path, "@FOLDER@": folder, "@NAME@": NAME}
    values |= {"@PYTHON@": sys.executable, "@TEMPLATES@": TEMPLATES}
    for path in (run.job, run.script):
        text = (OLDER / path.name).read_text()
        for word, value in values.items():
            text = text.replace(word, str(value))
        path.write_text(text)
    run.host.write_bytes((OLDER / "host.pyz").read_bytes())
    return run


def submit(desk: Desk, run: RunDir) -> None:
    """As the older version did: a rank finds submitit's pickle by the id of the job."""
    held = desk.slurm.run("sbatch", "--hold", "--parsable", str(run.script), check=True)
    job = held.stdout.strip()
    call = pickle.loads((OLDER / "submitted.pkl").read_bytes())
    call.function.run_dir = str(run.path)
    pickled = run.submitit / f"{job}_submitted.pkl"
    pickled.write_bytes(pickle.dumps(call))
    pickled.chmod(0o600)
    desk.slurm.run("scontrol", "release", job, check=True)


def test_it_is_preempted_and_comes_back(desk: Desk) -> None:
    run = unpacked(desk.folder)
    submit(desk, run)
    desk.training(NAME)
    desk.take_all_nodes()
    ended = desk.until(lambda s: s["state"] in ("COMPLETED", "FAILED", "LOST"), NAME)
    assert (ended["state"], ended["step"], ended["attempt"]) == ("COMPLETED", 200, 2)
    assert [attempt.cause for attempt in desk.attempts(NAME)] == ["preempted", "done"]
    assert lost(run) == 0
    assert "-m hpcddp.fork" in run.script.read_text()
    no_job_is_left(desk)
