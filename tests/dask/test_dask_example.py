"""The example of dask-pytorch-ddp in docs, with a real S3 server."""

import io
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import s3
from hpcddp.jobs import resnet
from local_runs import Command
from PIL import Image
from sites import CHECKOUT, Site

from hpcddp.rundir import RunDir

PROGRAM = CHECKOUT / "docs" / "dask_pytorch_ddp.py"
TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{6})?"
# 8 of 10 images on 2 ranks, 2 in a step: 2 steps of each rank in each of 2 epochs.
WORDS = ("images", "flowers", "--samplesize", "8", "--epochs", "2", "--batch-size", "2",
         "--size", "32", "--save-every", "3")  # fmt: skip
COUNTS = [(0, 1), (0, 2), (1, 3), (1, 4)]


def image(shade: int) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (40, 30), (shade, 255 - shade, 7)).save(data, "PNG")
    return data.getvalue()


@pytest.fixture(scope="module")
def server() -> Iterator[s3.Server]:
    with s3.serving() as made:
        names = [f"flowers/{kind}/{i}.png" for kind in ("rose", "tulip") for i in range(5)]
        made.put("images", {name: image(9 * i) for i, name in enumerate(names)})
        yield made


def check(folder: Path) -> None:
    """One file for each rank and step, the checkpoint of step 3, and nothing else."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.*")}
    files = {name: path for name, path in files.items() if path.is_file()}
    losses_of_ranks = []
    for rank in range(2):
        own = sorted(
            name for name in files if re.fullmatch(rf"worker/{rank}/data-{TIME}.json", name)
        )
        facts = [json.loads(files.pop(name).read_text()) for name in own]
        assert all(fact.keys() == {"loss", "epoch", "count", "worker"} for fact in facts)
        assert [(fact["epoch"], fact["count"]) for fact in facts] == COUNTS
        assert {fact["worker"] for fact in facts} == {rank}
        losses_of_ranks.append([fact["loss"] for fact in facts])
    assert all(0 < loss < 100 for losses in losses_of_ranks for loss in losses)
    assert losses_of_ranks[0] != losses_of_ranks[1]  # different samples on each rank
    [saved] = files
    assert re.fullmatch(rf"checkpoint-{TIME}.pkl", saved)
    weights = pickle.loads(files[saved].read_bytes())
    plain = {name.removeprefix("module."): value for name, value in weights.items()}
    resnet.model(classes=2).load_state_dict(plain)
    assert plain["bn1.num_batches_tracked"] == 3


def test_on_a_cluster_of_this_machine(server: s3.Server, tmp_path: Path) -> None:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "HPCDDP_"))}
    config = {"DASK_DISTRIBUTED__DASHBOARD__LINK": "", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(PROGRAM), *WORDS]
    done = subprocess.run(
        words, cwd=tmp_path, env=kept | server.environ | config,
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    check(tmp_path / "results")


@pytest.mark.full
def test_in_a_job(
    server: s3.Server, site: Site, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in server.environ.items():
        monkeypatch.setenv(name, value)
    site.write("program.py", PROGRAM.read_text())
    words = [sys.executable, "-m", "hpcddp.dask", "program.py", *WORDS]
    done = command("submit", "--gpus", "2", "--launcher", "dask", "--", *words)
    assert done.code == 0, done.text
    [run] = site.runs.glob("program-*")
    check(RunDir(run).results)
