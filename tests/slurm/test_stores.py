"""Training from a real S3 server on the real Slurm, preempted, and with the server away."""

import io
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from ranks import records
from s3 import Server, serving

from hpcddp.attempt import ledger
from hpcddp.rundir import RunDir, read_lines

from .desk import Desk, wait_for

IMAGES, BATCH = 96, 16
STEPS = IMAGES // BATCH  # of an epoch


@pytest.fixture(scope="module")
def store() -> Iterator[Server]:
    with serving() as server:
        server.put("pets", dict(_pictures(IMAGES, 24)))
        yield server


def _pictures(train: int, held_out: int) -> Iterator[tuple[str, bytes]]:
    """Two classes that differ in their colour."""
    drawn = random.Random(0)
    for split, count in (("train", train), ("val", held_out)):
        for i in range(count):
            colour = [drawn.randrange(90) for _ in range(3)]
            colour[i % 2 * 2] += 150
            data = io.BytesIO()
            Image.new("RGB", (40, 40), tuple(colour)).save(data, "png")
            yield f"photos/{split}/{('red', 'blue')[i % 2]}/{i:03}.png", data.getvalue()


def samples_of(run: RunDir, ranks: int) -> dict[int, Counter[int]]:
    """How often each epoch took each sample, over all ranks, steps that count alone."""
    taken: dict[int, tuple[int, list[int]]] = {}  # step -> epoch, samples
    for life in ledger.attempts(run):
        steps: dict[int, tuple[int, list[int]]] = {}
        for rank in range(ranks):
            for row in read_lines(run.attempt(life.number).trace(rank)):
                steps.setdefault(row["step"], (row["epoch"], []))[1].extend(row["ids"])
        taken |= steps
    found: dict[int, Counter[int]] = {}
    for epoch, ids in taken.values():
        found.setdefault(epoch, Counter()).update(ids)
    return found


@pytest.mark.parametrize(
    ("nodes", "gpus", "epochs", "away"),
    [("2", "1", 10, 0), pytest.param("2", "2", 16, 20, marks=pytest.mark.full)],
)
def test_a_resnet_learns_from_s3_preempted_twice_and_with_the_server_away(
    desk: Desk, store: Server, nodes: str, gpus: str, epochs: int, away: float
) -> None:
    desk = replace(desk, slurm=replace(desk.slurm, environ=desk.slurm.environ | store.environ))
    keys = {
        "dataset.root": "s3://pets/photos",
        "dataset.size": 32,
        "global_batch": BATCH,
        "epochs": epochs,
        "data.workers": 1,
        "data.cache": "0",  # each epoch reads from the store
        "train.trace": "true",
        "train.log_every": 1,
        "checkpoint.every": 0,
    }
    words = [word for name, value in keys.items() for word in ("--set", f"{name}={value}")]
    size = ("--nodes", nodes, "--gpus", gpus)
    run = json.loads(desk("submit", "resnet", *size, *words, "--detach", "--json").splitlines()[0])[
        "run"
    ]
    desk.training(run, step=2)
    desk.take_all_nodes()
    desk.training(run, attempt=2, step=STEPS + 2)
    folder = desk.run(run)
    began = time.monotonic()
    store.door.shut()  # the job says so once it has used up the batches that it read before
    wait_for(lambda: "does not answer" in folder.attempt(2).log.read_text())
    wait_for(lambda: time.monotonic() - began > away)
    at = desk.status(run)["step"]
    store.door.open()
    desk.training(run, attempt=2, step=at + STEPS)
    desk.take_all_nodes()
    desk.until(lambda s: s["state"] == "COMPLETED", run)
    lived = ledger.attempts(folder)
    assert [a.cause for a in lived] == ["preempted", "preempted", "done"]
    expected = Counter(range(IMAGES))
    assert samples_of(folder, int(nodes) * int(gpus)) == dict.fromkeys(range(epochs), expected)
    (end,) = records(folder, "eval", 3)[-1:]
    assert end["metrics"]["accuracy"] > 0.8
    secret = store.environ["AWS_SECRET_ACCESS_KEY"].encode()
    assert not [path for path in files(folder.path) if secret in path.read_bytes()]


def files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())
