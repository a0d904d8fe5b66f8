"""A training from shards in a store that fails in the middle."""

from pictures import pictures, put
from ranks import Ranks, global_steps, make_run, records, wait_for

from hpcddp.attempt import ledger
from hpcddp.data import pack
from hpcddp.rundir import read_step

TASK = """
import torch
from torch import nn
from hpcddp.data import ImageFolder

def model():
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 3))

def pixels(image):
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(64, 3) / 255

def dataset(split, root=""):
    return ImageFolder(root, pixels) if split == "train" else None

def loss(output, target):
    return nn.functional.cross_entropy(output, target)
"""
CLASSES = {"a": 40, "b": 21, "c": 9}


def test_a_training_waits_for_its_store_and_reads_every_sample_once(
    s3_server, tmp_path, monkeypatch
):
    for name, value in s3_server.environ.items():
        monkeypatch.setenv(name, value)
    images = put(
        tmp_path / "images", {n: d for n, d in pictures(CLASSES).items() if "cat" not in n}
    )
    pack(images, tmp_path / "shards", "22K")
    s3_server.door.open()
    s3_server.put("train", {p.name: p.read_bytes() for p in (tmp_path / "shards").iterdir()})
    run = make_run(tmp_path / "job", TASK, gpus=2, max_steps=0, epochs=12, train__trace=True,
                   data__workers=1, dataset__root="s3://train", data__cache="0",
                   train__drop_last=False, checkpoint__best="", checkpoint__every=0)  # fmt: skip
    begun = ledger.begin(run, ledger.new_attempt("1", 1), lambda earlier: False)
    assert begun
    with Ranks.of(run, 2) as ranks:
        attempt = run.attempt(1)
        wait_for(lambda: read_step(attempt)[0] > 10, "some steps")
        s3_server.door.shut_for(3)
        ends = ranks.wait()
    assert [code for code, _, _ in ends] == [0, 0], ends
    said = "".join(err for _, _, err in ends)
    assert "s3://train does not answer" in said and "s3://train answers again" in said
    steps = global_steps(run, 1, 2)
    each = -(-70 // 4)
    assert len(steps) == 12 * each
    for epoch in range(12):
        ids = [i for step in range(each) for i in steps[epoch * each + step + 1][0]]
        assert set(ids) == set(range(70)) and len(ids) == 70
    assert len(list(run.listings.glob("*.tsv"))) == 1
    assert records(run, "end")
