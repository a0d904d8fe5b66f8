"""Tar shards: those of pack, those of other programs, and reading them."""

import errno
import io
import json
import os
import subprocess
import sys
import tarfile
from collections import Counter
from itertools import chain

import fsspec
import numpy as np
import pytest
from pictures import number_of, numbers, picture, pictures, put
from torch.utils.data import DataLoader

from hpcddp.data import ImageFolder, folder, pack, stores
from hpcddp.errors import UserError
from hpcddp.topology import Topology
from hpcddp.train.input.sampler import ResumableSampler

MANY = {"a": 60, "b b": 45, "c": 31, "ü": 1}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return put(tmp_path_factory.mktemp("images"), pictures(MANY) | {"a/notes.txt": b""})


@pytest.fixture(scope="module")
def packed(images, tmp_path_factory):
    """Shards of about ten images."""
    target = tmp_path_factory.mktemp("packed") / "new"
    (images / "cat" / "notes.txt").unlink()
    (images / "cat").rmdir()
    assert pack(images, target, "22K", seed=1) > 10
    return target


@pytest.fixture(scope="module")
def stored(packed, s3_server):
    s3_server.put("shards", {f"x/{p.name}": p.read_bytes() for p in packed.iterdir()})
    return s3_server


@pytest.fixture
def server(stored, monkeypatch):
    for name, value in stored.environ.items():
        monkeypatch.setenv(name, value)
    stored.door.open()
    return stored


class Kept:
    """A minimal cache of files in a folder."""

    def __init__(self, path):
        self.path, self.fetched = path, []

    def get(self, key, size, fetch):
        path = self.path / key.replace("/", "_")
        if not path.exists():
            self.fetched.append(key)
            with open(path, "wb") as file:
                fetch(file)
            assert path.stat().st_size == size
        return open(path, "rb")


class Full:
    """A cache that is full."""

    def get(self, key, size, fetch):
        return None


def test_shards_hold_what_the_folder_holds(images, packed, server, tmp_path):
    whole = Counter(numbers(ImageFolder(images)))
    for root, cache in ((packed, None), ("s3://shards/x", None), ("s3://shards/x", Full()),
                        ("s3://shards/x", Kept(tmp_path))):  # fmt: skip
        dataset = ImageFolder(root, cache=cache)
        assert Counter(numbers(dataset)) == whole
        assert dataset.classes == list(MANY) and dataset.groups.sum() == len(dataset) == 137
    assert sum(map(whole.get, whole)) == 137


def test_without_their_index_shards_are_read_by_their_headers(packed, server, tmp_path):
    for shard in packed.glob("*.tar"):
        (tmp_path / shard.name).write_bytes(shard.read_bytes())
    bare, known = ImageFolder(tmp_path), ImageFolder(packed)
    assert numbers(bare) == numbers(known) and bare.classes == ["0", "1", "2", "3"]
    assert (bare.groups == known.groups).all()
    server.client().delete_object(Bucket="shards", Key="x/index.json")
    try:
        assert numbers(ImageFolder("s3://shards/x")) == numbers(known)
    finally:
        server.client().upload_file(str(packed / "index.json"), "shards", "x/index.json")


def test_a_shard_that_was_written_anew_is_not_read_by_its_old_index(packed, tmp_path, server):
    (tmp_path / "t").mkdir()
    for file in packed.iterdir():
        (tmp_path / "t" / file.name).write_bytes(file.read_bytes())
    write_tar(tmp_path / "t" / "shard-000000.tar", {"x.png": picture(999), "x.cls": b"c"})
    for path in (tmp_path / "t").iterdir():
        server.client().upload_file(str(path), "shards", f"anew/{path.name}")
    for root in (tmp_path / "t", "s3://shards/anew"):
        dataset = ImageFolder(root)
        assert numbers(dataset)[0] == (999, dataset.class_to_idx["c"])


def test_a_number_is_a_class_of_the_index_also_in_a_shard_that_it_does_not_have(packed, tmp_path):
    for file in packed.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    more = {
        "x.png": picture(999),
        "x.cls": b"2\n",
        "d/y.png": picture(998),
        "3/z.png": picture(997),
    }
    write_tar(tmp_path / "shard-more.tar", {**more, "d/y.cls": b"b b"})
    dataset = ImageFolder(tmp_path)
    assert dataset.classes == ["3", *MANY]  # the folder's name is not a class number
    labels = dict(numbers(dataset))
    named = {number: dataset.classes[label] for number, label in labels.items()}
    assert (named[999], named[998], named[997]) == ("c", "b b", "3")
    before = ImageFolder(packed)
    assert {n: before.classes[label] for n, label in numbers(before)}.items() <= named.items()
    write_tar(tmp_path / "shard-more.tar", {"x.png": picture(999), "x.cls": b"4"})
    with pytest.raises(UserError, match=r"class 4 is not in index\.json, which has 4") as error:
        ImageFolder(tmp_path)
    assert error.value.where == f"{tmp_path}/shard-more.tar"


@pytest.mark.parametrize("kept", [False, True])
def test_a_shard_that_was_cut_since_it_was_listed_is_told(packed, tmp_path, kept):
    """Also where the shard was open before."""
    for file in packed.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    dataset = ImageFolder(tmp_path)
    last = int(dataset.groups[0]) - 1
    if kept:
        dataset[last]
    os.truncate(tmp_path / "shard-000000.tar", 5000)
    with pytest.raises(UserError, match="the data changed after it was listed") as error:
        dataset[last]
    assert error.value.where == f"{tmp_path}/shard-000000.tar"
    assert dataset[last + 1][1] == dataset.targets[last + 1]


def test_what_an_open_file_does_not_give_is_asked_for_anew(server, tmp_path, monkeypatch):
    """Such as after a failure of the cache's disk."""
    dataset = ImageFolder("s3://shards/x", number_of, cache=Kept(tmp_path))
    wanted = dataset[4]

    def fails(*args):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", fails)
    assert dataset[4] == wanted


def test_a_node_fetches_a_shard_once_whole(server, tmp_path):
    kept = Kept(tmp_path)
    dataset = ImageFolder("s3://shards/x", cache=kept)
    order = np.random.default_rng(0).permutation(len(dataset))
    for start in range(0, len(dataset), 16):
        dataset.prefetch(order[start : start + 16].tolist())
        [dataset[int(i)] for i in order[start : start + 16]]
    assert len(kept.fetched) == len(set(kept.fetched)) == len(dataset.groups)
    before = server.door.requests
    again = ImageFolder("s3://shards/x", cache=kept)
    listing = server.door.requests - before
    numbers(again)
    assert server.door.requests - before == listing <= 2
    assert all("s3://shards/x/shard-" in key for key in kept.fetched)


@pytest.mark.parametrize(("nodes", "limit", "whole"), [
    (4, None, True), (5, None, False), (5, 100_000, False), (5, 10**6, True),
])  # fmt: skip
def test_many_nodes_take_a_shard_whole_only_where_all_of_them_are_kept(
    server, tmp_path, monkeypatch, nodes, limit, whole
):
    """Otherwise each node would fetch the whole dataset in every epoch, and use a part of it."""
    for name, value in Topology(nodes, 2).rank_of(3).to_env().items():
        monkeypatch.setenv(name, value)
    kept = Kept(tmp_path)
    if limit:
        kept.limit = limit
    dataset = ImageFolder("s3://shards/x", number_of, cache=kept)
    mine = list(range(3, len(dataset), 2 * nodes))
    before = server.door.requests
    assert [label for _, label in dataset.__getitems__(mine)] == dataset.targets[mine].tolist()
    assert bool(kept.fetched) is whole
    assert whole or server.door.requests - before == len(mine)


def test_more_shards_than_may_be_open_are_read(packed, monkeypatch):
    from hpcddp.data import reading

    monkeypatch.setattr(reading, "OPEN", 2)
    dataset = ImageFolder(packed)
    order = [i for _ in range(3) for i in range(0, len(dataset), 7)]
    assert [dataset[i][1] for i in order] == [dataset.targets[i] for i in order]
    assert len(dataset._reading._here.shards) <= 3


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_sample_once_an_epoch_in_the_same_global_batches(packed, world):
    dataset = ImageFolder(packed, number_of)
    batches = []
    for rank in range(world):
        sampler = ResumableSampler(dataset, world, rank, seed=5)
        loader = DataLoader(dataset, batch_size=6 // world, sampler=sampler,
                            num_workers=2 if world == 2 else 0)  # fmt: skip
        batches.append([images.tolist() for images, _ in loader])
    whole = [sorted(chain.from_iterable(step)) for step in zip(*batches, strict=True)]
    sampler = ResumableSampler(dataset, 1, 0, seed=5)
    alone = [images.tolist() for images, _ in DataLoader(dataset, batch_size=6, sampler=sampler)]
    assert whole[:-1] == [sorted(step) for step in alone][:-1]
    assert sorted({i for step in whole for i in step}) == list(range(137))


def test_pack_mixes_the_classes_and_gives_the_same_bytes_again(images, packed, tmp_path):
    dataset = ImageFolder(packed)
    first = dataset.targets[: dataset.groups[:3].sum()]
    assert len(set(first.tolist())) >= 3
    pack(images, tmp_path / "same", "22K", seed=1)
    pack(images, tmp_path / "other", "22K", seed=2)
    same = {p.name: p.read_bytes() for p in (tmp_path / "same").iterdir()}
    assert same == {p.name: p.read_bytes() for p in packed.iterdir()}
    assert same != {p.name: p.read_bytes() for p in (tmp_path / "other").iterdir()}
    sizes = [len(data) for name, data in same.items() if name.endswith(".tar")]
    assert max(sizes) <= 22 * 1024 + 2 * tarfile.RECORDSIZE


def test_what_pack_writes_is_webdatasets_layout(packed):
    index = json.loads((packed / "index.json").read_text())
    seen = 0
    for shard in sorted(packed.glob("*.tar")):
        with tarfile.open(shard) as tar:
            names = tar.getnames()
            assert [n.rpartition(".")[2] for n in names[:2]] == ["cls", "png"]
            keys = [n.partition(".")[0] for n in names]
            assert keys[0::2] == keys[1::2] and len(set(keys)) == len(keys) // 2
            number = int(tar.extractfile(names[0]).read())
            assert 0 <= number < len(index["classes"])
            seen += len(names) // 2
    assert seen == 137


def write_tar(path, members):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:", format=tarfile.PAX_FORMAT) as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            if data is None:
                member.type = tarfile.DIRTYPE
            member.size = len(data or b"")
            tar.addfile(member, io.BytesIO(data or b""))
    return path


def test_shards_of_others_are_read(tmp_path):
    """Names of classes, folders as classes, members of other kinds, and long names."""
    long = "k" * 180
    first = {"cat": None, "cat/1.JPG": picture(1, "PPM"), "./dog/x/2.png": picture(2),
             "dog/x/2.json": b"{}", f"dog/{long} ü.png": picture(3)}  # fmt: skip
    second = {"4.cls": b"dog\n", "4.png": picture(4), "4.seg.png": picture(9),
              "cat/5.png": picture(5), "cat/5.cls": b"fish"}  # fmt: skip
    write_tar(tmp_path / "0.tar", first)
    write_tar(tmp_path / "deep" / "1.tar", second)
    dataset = ImageFolder(tmp_path)
    assert dataset.classes == ["cat", "dog", "fish"]
    assert numbers(dataset) == [(1, 0), (2, 1), (3, 1), (4, 1), (5, 2)]


def test_names_in_a_shard_never_become_paths(tmp_path, monkeypatch):
    """A shard is read in place: nothing is unpacked, and links in it are no samples."""
    secret = tmp_path / "secret.png"
    secret.write_bytes(picture(7))
    shard = tmp_path / "data" / "0.tar"
    write_tar(shard, {"../../evil/1.png": picture(1), "..//x/../2.png": picture(2)})
    with tarfile.open(shard, "a") as tar:
        for name, kind in (("cat/3.png", tarfile.SYMTYPE), ("cat/4.png", tarfile.LNKTYPE)):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, str(secret)
            tar.addfile(member)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    before = sorted(tmp_path.rglob("*"))
    assert [number for number, _ in numbers(ImageFolder(shard.parent))] == [1, 2]
    assert sorted(tmp_path.rglob("*")) == before


def test_numbers_of_classes_are_their_own_unless_they_are_far_too_large(tmp_path):
    few = {"1.cls": b"7", "1.png": picture(1), "2.cls": b"2", "2.png": picture(2)}
    write_tar(tmp_path / "few" / "0.tar", few)
    dataset = ImageFolder(tmp_path / "few")
    assert dataset.classes == [str(i) for i in range(8)] and numbers(dataset) == [(1, 7), (2, 2)]
    write_tar(tmp_path / "large" / "0.tar", few | {"3.cls": b"9" * 12, "3.png": picture(3)})
    dataset = ImageFolder(tmp_path / "large")
    assert dataset.classes == ["2", "7", "9" * 12] and numbers(dataset) == [(1, 1), (2, 0), (3, 2)]


def test_one_shard_and_patterns_of_shards_are_roots(packed):
    each = [int(n) for n in ImageFolder(packed).groups]
    assert len(ImageFolder(packed / "shard-000002.tar")) == each[2]
    some = ImageFolder(f"{packed}/shard-{{000001..000003}}.tar")
    assert some.groups.tolist() == each[1:4]
    with pytest.raises(UserError, match=r"shard not found \(3 more missing\)") as error:
        ImageFolder(f"{packed}/shard-{{000001..{len(each) + 3:06}}}.tar")
    assert error.value.where == f"{packed}/shard-{len(each):06}.tar"


def test_what_lies_beside_a_named_shard_is_not_looked_at(packed, server, tmp_path, monkeypatch):
    """There may be many other files, or unreadable ones."""
    for name in ("shard-000002.tar", "shard-000003.tar", "index.json"):
        (tmp_path / name).write_bytes((packed / name).read_bytes())

    def closed(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(os, "scandir", closed)
    server.door.answer(403, "AccessDenied", to="prefix=x%2F HTTP")
    with pytest.raises(UserError, match="access denied"):
        ImageFolder("s3://shards/x")
    for root in (tmp_path, "s3://shards/x"):
        assert len(ImageFolder(f"{root}/shard-000002.tar").groups) == 1
        assert len(ImageFolder(f"{root}/shard-{{000002..000003}}.tar").groups) == 2
        with pytest.raises(UserError, match="shard not found"):
            ImageFolder(f"{root}/shard-00000.tar")


@pytest.mark.parametrize("few", [1, 2])
def test_shards_of_any_store_are_asked_for_one_by_one_or_listed(packed, monkeypatch, few):
    monkeypatch.setattr(stores, "FEW", few)
    memory = fsspec.filesystem("memory")
    for name in ("shard-000001.tar", "shard-000002.tar", "shard-000003.tar", "index.json"):
        memory.pipe(f"/few/{name}", (packed / name).read_bytes())
    assert len(ImageFolder("memory://few/shard-{000002..000003}.tar").groups) == 2
    with pytest.raises(UserError, match="shard not found"):
        ImageFolder("memory://few/shard-{000003..000004}.tar")


def test_braces_stand_for_what_a_shell_makes_of_them():
    assert folder.expand("a-{08..11}-{x,y}.tar")[:3] == ["a-08-x.tar", "a-08-y.tar", "a-09-x.tar"]
    assert folder.expand("plain.tar") == ["plain.tar"]


BROKEN = {
    "text": (lambda p: p.write_bytes(b"no tar" * 999), "invalid tar file"),
    "cut": (lambda p: p.write_bytes(p.read_bytes()[:560]), "invalid tar file"),
    "no images": (lambda p: write_tar(p, {"a/1.txt": b""}), "no images in the shards"),
    "no class": (lambda p: write_tar(p, {"1.png": picture(1)}), "1.png has no class"),
    "bad class": (
        lambda p: write_tar(p, {"1.png": b"", "1.cls": b" \n"}),
        "1.cls contains neither",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_shard_that_cannot_be_read_is_named(tmp_path, kind):
    write_tar(tmp_path / "0.tar", {"a/1.png": picture(1), "a/2.png": picture(2)})
    change, message = BROKEN[kind]
    change(tmp_path / "0.tar")
    with pytest.raises(UserError, match=message) as error:
        ImageFolder(tmp_path)
    assert error.value.where.startswith(str(tmp_path))


def test_a_bad_image_in_a_shard_is_named_and_skipped(tmp_path, capfd):
    write_tar(
        tmp_path / "0.tar", {"a/1.png": b"no image", "b/2.png": picture(2), "a/3.png": picture(3)}
    )
    with pytest.raises(UserError, match="invalid image") as error:
        ImageFolder(tmp_path)[0]
    assert error.value.where == f"{tmp_path}/0.tar: a/1.png"
    assert ImageFolder(tmp_path, number_of, on_bad="skip")[0] == (3, 0)


def command(*words):
    done = subprocess.run([sys.executable, "-m", "hpcddp.data", *words], env=os.environ, text=True,
                          capture_output=True, check=False)  # fmt: skip
    assert "Traceback" not in done.stderr
    return done


def test_the_command_packs_from_a_store(server, tmp_path):
    server.put("loose", pictures(MANY))
    server.client().delete_object(Bucket="loose", Key="cat/notes.txt")
    done = command("pack", "s3://loose", str(tmp_path / "new"), "--size", "22K", "--seed", "1")
    assert done.returncode == 0 and f"shards in {tmp_path / 'new'}" in done.stdout, done.stderr
    assert len(ImageFolder(tmp_path / "new")) == 137


def test_the_command_tells_what_is_wrong(images, packed, tmp_path):
    for words, message in (
        (["pack", str(tmp_path / "none"), str(tmp_path / "new")], "not found"),
        (["pack", str(images), str(packed)], "the target folder is not empty"),
    ):
        done = command(*words)
        assert done.returncode == 2 and message in done.stderr
    invalid = "invalid shard size"
    for size, target, message in (
        ("0", "new", invalid),
        ("x", "new", invalid),
        ("80", "new", "has no unit"),
        ("1M", "s3://b/x", "must be a local folder"),
    ):
        with pytest.raises(UserError, match=message):
            pack(images, tmp_path / target if "://" not in target else target, size)
    with pytest.raises(UserError, match="already contains shards"):
        pack(packed, tmp_path / "again")
