"""`hpcddp export` and `import` as a user types them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from ranks import make_run, one_rank
from sites import Outcome, Site

from hpcddp.cli.submit import submit
from hpcddp.cli.weights import import_
from hpcddp.rundir import RunDir
from hpcddp.train.checkpoint import plainfile

Command = Callable[..., Outcome]
WEIGHTS = {"0.weight": torch.ones(3, 2), "0.bias": torch.zeros(3)}


@pytest.fixture
def weights(site: Site) -> Path:
    path = site.folder / "weights.pt"
    plainfile.write(WEIGHTS, path)
    return path


def only_run(site: Site) -> RunDir:
    (path,) = site.runs.iterdir()
    return RunDir(path)


def started_from(run: RunDir) -> str:
    return str(json.loads(run.job.read_text())["spec"]["start_from"])


def source(hpcddp: Command, *arguments: str) -> Any:
    done = hpcddp("config", "--cluster", "slurm", *arguments, "--json")
    assert done.code == 0, done.err
    return json.loads(done.out)["keys"]["start_from"]


def test_export_writes_the_form_that_the_name_says(site: Site, hpcddp: Command) -> None:
    run = make_run(site.runs, max_steps=2)
    one_rank(run)
    for name, load in (("w.pt", torch.load), ("w.safetensors", safetensors.torch.load_file)):
        done = hpcddp("export", "run", name)
        line = f"{name}: weights of run at step 2\n"
        assert (done.code, done.out, done.err) == (0, "", line)
        assert load(site.folder / name).keys() == {"0.weight", "0.bias", "3.weight", "3.bias"}
    refused = hpcddp("export", "run", "nowhere/w.pt")
    assert refused.code == 2 and "nowhere/w.pt: cannot be written" in refused.err


def test_import_submits_a_run_that_starts_from_the_file(
    site: Site, hpcddp: Command, weights: Path
) -> None:
    site.slurm()
    done = hpcddp("import", "weights.pt", "toy", "--nodes", "2", "--gpus", "4", "-J", "fine-tune")
    assert done.code == 0, done.err
    run = only_run(site)
    assert run.name.startswith("fine-tune-") and started_from(run) == str(weights)
    assert "weights.pt: 2 tensors, 9 values\n" in done.err
    assert f"run     {run.name}\njob     42\n" in done.out
    assert json.loads(run.job.read_text())["nodes"] == [2, 2]


def test_import_has_the_options_of_submit(site: Site, hpcddp: Command, weights: Path) -> None:
    site.slurm()
    assert hpcddp("import", "weights.pt", "--parsable").out == "42\n"
    assert json.loads(hpcddp("import", "weights.pt", "toy", "--json").out)["job_id"] == "42"
    before = set(site.runs.iterdir())
    dry = hpcddp("import", "weights.pt", "--dry-run")
    assert dry.code == 0 and dry.out.startswith("#!/bin/bash\n# Made by hpcddp ")
    assert set(site.runs.iterdir()) == before
    theirs, ours = ({o for p in c.params for o in p.opts} for c in (submit, import_))
    assert theirs - ours == {"--show-snapshot"}  # of a program's code
    assert ours - theirs == {"file"}


@pytest.mark.parametrize(
    ("file", "code", "words"),
    [
        ("gone.pt", 2, ["command line: start_from is '", "gone.pt', which does not exist"]),
        ("jobs", 2, ["jobs', which is a folder", "hpcddp export"]),
        ("cut.pt", 1, ["cut.pt: not a weights file", "copied completely"]),
        ("jobs/toy.toml", 1, ["jobs/toy.toml: not a weights file"]),
    ],
)
def test_a_file_that_cannot_be_read_is_told_before_anything_is_submitted(
    site: Site, hpcddp: Command, weights: Path, file: str, code: int, words: list[str]
) -> None:
    site.slurm()
    (site.folder / "cut.pt").write_bytes(weights.read_bytes()[:-50])
    done = hpcddp("import", file, "toy")
    assert (done.code, done.out) == (code, "")
    assert all(word in done.err for word in words), done.err
    assert not site.runs.exists()


def test_the_file_is_named_from_where_it_is_said(
    site: Site, hpcddp: Command, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the job file, or from the current folder; what a higher place says wins."""
    beside = site.folder / "jobs" / "mine.pt"
    plainfile.write(WEIGHTS, beside)
    job = site.job("toy", 'start_from = "mine.pt"\nepochs = 1')
    assert source(hpcddp) == {"value": str(beside), "source": str(job)}
    monkeypatch.setenv("HPCDDP_START_FROM", "weights.pt")
    assert source(hpcddp) == {"value": str(weights), "source": "HPCDDP_START_FROM"}
    assert source(hpcddp, "--set", "start_from=jobs/mine.pt")["value"] == str(beside)
    assert source(hpcddp, "--set", "start_from=") == {"value": "", "source": "--set"}
    monkeypatch.delenv("HPCDDP_START_FROM")
    beside.unlink()
    done = hpcddp("render")
    assert done.code == 2
    assert f"{job}: start_from is '{beside}', which does not exist" in done.err
    assert not site.runs.exists()


def test_a_program_takes_no_weights_from_us(site: Site, hpcddp: Command, weights: Path) -> None:
    site.slurm()
    site.job("program", 'command = ["bash", "-c", "true"]')
    done = hpcddp("import", "weights.pt", "program")
    assert done.code == 2 and "start_from requires a task" in done.err
    assert not site.runs.exists()


def test_a_run_that_has_saved_needs_the_file_no_more(
    site: Site, hpcddp: Command, weights: Path
) -> None:
    site.slurm(squeue="exit 0", sacct="echo '42|FAILED|1:0|x'")
    assert hpcddp("import", "weights.pt").code == 0
    run = only_run(site)
    weights.unlink()
    hpcddp("cancel", "last")
    refused = hpcddp("resume", "last")
    assert refused.code == 2, refused.text
    assert f"{run.job}: start_from is '{weights}', which does not exist" in refused.err
    saved = run.checkpoints / "step-1" / "COMPLETE"
    saved.parent.mkdir(parents=True)
    saved.touch()
    done = hpcddp("resume", "last")
    assert done.code == 0, done.text
    assert started_from(run) == str(weights)  # where it came from stays known
