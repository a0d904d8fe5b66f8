"""The samples of a dataset: one listing for all ranks and attempts of a run."""

import os
import threading
import time

import numpy as np
import pytest
from pictures import numbers, pictures, put
from ranks import make_run, wait_for

from hpcddp.data import ImageFolder, listing, listings
from hpcddp.data.listing import Sample, collect
from hpcddp.data.objects import StoreObject
from hpcddp.errors import RunError, UserError
from hpcddp.topology import Rank, Topology


def be(monkeypatch, rank):
    """Make this process a rank of 8 on 2 nodes, by a launcher's variables."""
    for name, value in Topology(2, 4).rank_of(rank).to_env().items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Make this process rank 0 of a run."""
    folder = make_run(tmp_path / "job")
    monkeypatch.setenv("HPCDDP_RUN_DIR", str(folder.path))
    be(monkeypatch, 0)
    return folder


@pytest.fixture
def folder(tmp_path):
    return put(tmp_path / "images", pictures())


def published(run):
    return sorted(path.name for path in run.listings.iterdir())


def test_a_requeue_sees_the_same_samples_although_some_came(run, folder):
    before = numbers(ImageFolder(folder))
    put(folder, {"cat/000 new.png": b"new", "newclass/1.png": b"new"})
    again = ImageFolder(folder)
    assert numbers(again) == before and "newclass" not in again.classes
    (name,) = published(run)
    assert (
        name.startswith(f"{str(folder.parent.name)[-8:].lower()}".replace("_", "-")[-3:])
        or "images" in name
    )
    assert run.listing(name.removesuffix(".tsv")).is_file()


def test_a_requeue_from_s3_sees_the_same_samples_although_some_came(run, s3_server, monkeypatch):
    for name, value in s3_server.environ.items():
        monkeypatch.setenv(name, value)
    s3_server.door.open()
    s3_server.put("growing", pictures(prefix="p/"))
    before = numbers(ImageFolder("s3://growing/p"))
    s3_server.client().put_object(Bucket="growing", Key="p/cat/000.png", Body=b"new")
    assert numbers(ImageFolder("s3://growing/p")) == before
    monkeypatch.delenv("HPCDDP_RUN_DIR")
    assert len(ImageFolder("s3://growing/p")) == len(before) + 1


def test_outside_of_a_run_nothing_is_written(folder, tmp_path, monkeypatch):
    monkeypatch.delenv("HPCDDP_RUN_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    ImageFolder(folder)[0]
    assert sorted(tmp_path.rglob("*")) == before


def test_other_ranks_wait_for_the_first_and_read_what_it_published(run, folder, monkeypatch):
    """Also ranks that would find more samples."""
    path = run.listing(listings.name_of(str(folder)))
    own = ImageFolder(folder)._listing
    path.unlink()
    put(folder, {"cat/zz.png": b"new"})
    be(monkeypatch, 1)
    seen = []
    rank = threading.Thread(target=lambda: seen.append(len(ImageFolder(folder))))
    with listings._signs(path):
        rank.start()
        rank.join(0.5)
        assert rank.is_alive() and not path.exists()
        listing.write(path, own)
        rank.join(60)
    assert seen == [len(own)] and published(run) == [path.name]


SRUN = {"SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_TASKS_PER_NODE": "4(x2)",
        "SLURM_NNODES": "2", "SLURM_NODEID": "1"}  # fmt: skip


@pytest.mark.parametrize(("environ", "first"), [
    (SRUN | {"SLURM_PROCID": "5"}, False),
    (SRUN | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}, True),
    ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, False),
    ({}, True),
    ({"RANK": "5"}, True),
])  # fmt: skip
def test_the_first_rank_lists_whatever_started_it(run, folder, monkeypatch, environ, first):
    """srun does not set RANK: otherwise thousands of ranks would list one store."""
    for name in Rank(0, 1, 0, 1, 0).to_env():
        monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    waited = []
    monkeypatch.setattr(listings, "_awaited", lambda path: waited.append(path))
    ImageFolder(folder)
    assert bool(waited) is not first


def test_a_rank_that_sees_nothing_of_the_first_lists_for_itself(run, folder, monkeypatch):
    be(monkeypatch, 3)
    monkeypatch.setattr(listings, "SILENT_SECONDS", 0.3)
    path = run.listing(listings.name_of(str(folder)))
    path.parent.mkdir()
    listings._sign(path).write_text("an older life was killed here\n")
    begun = time.monotonic()
    assert len(ImageFolder(folder)) == 16
    assert time.monotonic() - begun > 0.3 and path.is_file()


def test_as_long_as_the_first_rank_shows_signs_it_is_waited_for(run, tmp_path, monkeypatch):
    monkeypatch.setattr(listings, "SILENT_SECONDS", 1.0)
    monkeypatch.setattr(listings, "SIGN_SECONDS", 0.05)
    path = run.listing("x")
    seen = []
    waiting = threading.Thread(target=lambda: seen.append(listings._awaited(path)))
    with listings._signs(path):
        wait_for(listings._sign(path).exists, "a sign")
        waiting.start()
        waiting.join(1.8)
        assert waiting.is_alive()
    waiting.join(30)
    assert seen == [False] and not listings._sign(path).exists()


def test_a_rank_that_stood_still_itself_looks_before_it_gives_up(run, tmp_path, monkeypatch):
    path, slept = run.listing("x"), []

    def long(seconds):
        slept.append(seconds)
        listings._sign(path).write_text(str(len(slept)))
        if len(slept) == 3:
            path.touch()

    path.parent.mkdir()
    monkeypatch.setattr(time, "monotonic", lambda: 2.0 * listings.SILENT_SECONDS * len(slept))
    monkeypatch.setattr(time, "sleep", long)
    assert listings._awaited(path) and len(slept) == 3


def test_what_each_node_has_in_another_place_has_one_listing(run, folder, tmp_path, monkeypatch):
    """Staged data: the second node reads the first node's listing, and never lists."""
    monkeypatch.setenv("HPCDDP_STAGE", str(tmp_path))
    before = numbers(ImageFolder(folder))
    other = put(tmp_path / "node2" / "images", pictures() | {"cat/zz.png": b"new"})
    monkeypatch.setenv("HPCDDP_STAGE", str(tmp_path / "node2"))
    be(monkeypatch, 4)
    assert numbers(ImageFolder(other)) == before and len(published(run)) == 1


def test_of_two_that_publish_the_first_wins(run):
    one, two = (collect("/r", ["a"], [], [Sample(0, -1, 0, 1, 0, n)]) for n in ("1", "2"))
    path = run.listing("x")
    listing.write(path, one)
    listing.write(path, two)
    assert listing.read(path).names[0] == "1" and published(run) == ["x.tsv"]


def test_any_name_and_number_survives_the_file(tmp_path):
    names = ["a/1.jpg", "tab\there", "line\nbreak\r", "back\\slash\\n", "ü/größe 数.png",
             os.fsdecode(b"no utf-8 \xff"), " ", "\x85\u2028"]  # fmt: skip
    samples = [Sample(i % 3, i - 1, i << 40, i << 50, (1 << 63) - 1 - i, n)
               for i, n in enumerate(names)]  # fmt: skip
    shards = [StoreObject(f"s{i}\n.tar", i << 45, i) for i in range(8)]
    listing.write(tmp_path / "l" / "x.tsv", collect("s3://r", ["a", "b\t", "c"], shards, samples))
    copy = listing.read(tmp_path / "l" / "x.tsv")
    assert [copy[i] for i in range(len(copy))] == samples
    assert (copy.shards, copy.classes, copy.root) == (shards, ["a", "b\t", "c"], "s3://r")


@pytest.mark.parametrize(
    "damage", [lambda t: t[:-9], lambda t: t[40:], lambda t: "", lambda t: t + "x\n"]
)
def test_a_damaged_listing_is_told(run, folder, damage):
    ImageFolder(folder)
    path = run.listings / published(run)[0]
    path.write_text(damage(path.read_text()))
    with pytest.raises(RunError, match="damaged listing") as error:
        ImageFolder(folder)
    assert error.value.where == str(path)


def test_a_listing_of_many_samples_is_a_few_arrays():
    count = 50_000
    rows = (Sample(i % 10, -1, 0, 99, 0, f"class {i % 10}/{i:08}.jpg") for i in range(count))
    listed = collect("/r", [str(i) for i in range(10)], [], rows)
    held = sum(a.nbytes for a in (*listed._columns, listed.names._data, listed.names._ends))
    assert held < 70 * count and listed[count - 1].name == f"class 9/{count - 1:08}.jpg"
    assert isinstance(listed.names._ends, np.ndarray)


BAD = {
    "nothing": ([], "no files found", ""),
    "images without a class": (["1.jpg", "2.jpg"], "no class folders found", ""),
    "a class without images": (["a/1.jpg", "b/1.txt"], "no images in this class folder", "/b"),
    "an empty class": (["a/1.jpg", "b/"], "no images in this class folder", "/b"),
    "no images at all": (["b/1.txt"], "no images found", "/b"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_a_folder_that_is_not_as_it_must_be_is_told(tmp_path, kind):
    names, message, where = BAD[kind]
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.mkdir() if name.endswith("/") else path.touch()
    with pytest.raises(UserError, match=message) as error:
        ImageFolder(tmp_path)
    assert error.value.where == str(tmp_path) + where and ".jpg" in error.value.hint


def test_a_folder_with_the_name_of_an_image_is_none(tmp_path, s3_server, monkeypatch):
    """Also where a store reports only the folder."""
    names = ["cat/1.png", "cat/2.png/", "cat/2.png/x.png", "dog.jpg/1.png"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).mkdir() if name.endswith("/") else (tmp_path / name).touch()
    for name, value in s3_server.environ.items():
        monkeypatch.setenv(name, value)
    s3_server.door.open()
    s3_server.put("folders", {f"p/{name}": b"" for name in [*names, "dog.jpg/"]})
    for root in (tmp_path, "s3://folders/p"):
        dataset = ImageFolder(root)
        assert [dataset._listing.names[i] for i in range(len(dataset))] == [names[0], *names[2:]]
        assert dataset.classes == ["cat", "dog.jpg"]


def test_a_folder_that_is_not_there_is_told(tmp_path):
    with pytest.raises(UserError, match="not found") as error:
        ImageFolder(tmp_path / "none")
    assert error.value.where == str(tmp_path / "none")


def test_links_are_followed_but_not_in_circles(tmp_path):
    put(tmp_path, {"real/1.png": b"x", "root/a/1.png": b"x"})
    (tmp_path / "root" / "b").symlink_to(tmp_path / "real")
    (tmp_path / "root" / "a" / "again").symlink_to(tmp_path / "root")
    dataset = ImageFolder(tmp_path / "root")
    assert dataset.classes == ["a", "b"] and len(dataset) == 2
