"""`hpcddp resume` of another model than the checkpoint's: refused, with nothing changed."""

from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import TASK, make_run, one_rank, wait_for
from sites import Outcome, Site

from hpcddp.rundir import RunDir
from hpcddp.submit import resume_check

Command = Callable[..., Outcome]
WIDE = TASK.replace("dropout=0.0", "width=8, dropout=0.0").replace("8", "width")
WIDE = WIDE.replace("width=width", "width=8")


@pytest.fixture
def run(site: Site) -> RunDir:
    """A run on Slurm that has saved a checkpoint."""
    site.slurm()
    made = make_run(site.runs, WIDE, max_steps=2, name="small")
    one_rank(made)
    wait_for(made.versions.exists, "the versions, which a thread of the rank writes")
    return made


def rewrite(run: RunDir, text: str) -> None:
    """Give the run's task another code."""
    run.path.with_name("small_task.py").write_text(text)


def resume(hpcddp: Command, *values: str) -> Outcome:
    keys = (word for value in values for word in ("--set", value))
    return hpcddp("resume", "run", "--cluster", "slurm", *keys)


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(hpcddp: Command, run: RunDir, *values: str) -> str:
    """What a resume says that changes nothing."""
    before = content(run.path)
    done = resume(hpcddp, *values)
    assert (done.code, done.out) == (2, ""), done.text
    assert content(run.path) == before
    return done.err


def test_another_model_is_refused_with_its_names(hpcddp: Command, run: RunDir) -> None:
    said = refused(hpcddp, run, "model.width=16")
    assert "step-2: the checkpoint is of another model: model.0.bias is [8] in the" in said
    assert "in the checkpoint and [16] in the model" in said
    assert "\n  restore the model's code and the keys of [model], or submit a new run" in said


def test_code_that_changed_since_is_another_model(hpcddp: Command, run: RunDir) -> None:
    rewrite(run, WIDE.replace("nn.Linear(width, 2)", "nn.Linear(width, 2, bias=False)"))
    assert "model.3.bias is [2] in the checkpoint and missing in the model" in refused(hpcddp, run)


def test_a_key_that_the_model_does_not_take_is_refused(hpcddp: Command, run: RunDir) -> None:
    said = refused(hpcddp, run, "model.widht=8")
    assert "model() cannot be called with the job's options: got an unexpected" in said


def test_another_format_is_refused(hpcddp: Command, run: RunDir) -> None:
    meta = run.checkpoints / "step-2" / "meta.json"
    text = meta.read_text()
    assert text.count('"format": 1,') == 1
    meta.write_text(text.replace('"format": 1,', '"format": 2,'))
    assert "the checkpoint has format 2, expected format 1" in refused(hpcddp, run)


def test_the_same_model_goes_on_with_other_values(hpcddp: Command, run: RunDir) -> None:
    done = resume(hpcddp, "max_steps=9", "strategy=fsdp", "model.dropout=0.5")
    assert done.code == 0, done.text
    assert "job     42" in done.out and "compared" not in done.err


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ('raise RuntimeError("no GPU")', "RuntimeError: no GPU"),
        ("import nowhere", "ModuleNotFoundError: No module named 'nowhere'"),
        (
            "def model(**o): return nn.Linear(2, int(torch.ones(2).sum()))",
            "DataDependentOutputException",
        ),
        ("import os; os._exit(3)", "the process printed nothing"),
        ("import time; time.sleep(60)", "no answer in 2 s"),
    ],
)
def test_where_it_cannot_be_compared_the_job_does_it(
    hpcddp: Command, run: RunDir, monkeypatch: pytest.MonkeyPatch, code: str, why: str
) -> None:
    monkeypatch.setattr(resume_check, "PATIENCE", 2 if "sleep" in code else 120)
    rewrite(run, f"{WIDE}\n{code}\n")
    done = resume(hpcddp, "model.width=16")
    assert done.code == 0 and "job     42" in done.out, done.text
    assert f"could not be compared with the checkpoint here ({why}" in done.err
    assert "; the next attempt compares them" in done.err


def test_what_cannot_be_read_now_is_compared_later(hpcddp: Command, run: RunDir) -> None:
    mark = run.checkpoints / "step-2" / "COMPLETE"
    mark.unlink()
    mark.mkdir()  # no user and no root can read it as a file
    done = resume(hpcddp, "model.width=16")
    assert done.code == 0 and "here (the checkpoints cannot be read now" in done.err, done.text


def test_a_run_without_a_checkpoint_is_not_looked_at(hpcddp: Command, run: RunDir) -> None:
    (run.checkpoints / "step-2" / "COMPLETE").unlink()
    rewrite(run, "raise RuntimeError\n")
    done = resume(hpcddp, "model.width=16")
    assert (done.code, "compared" in done.err) == (0, False), done.text
