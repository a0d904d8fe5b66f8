"""One constructor for a folder, S3 and stores of fsspec; and a store that fails."""

import io
import os
import pickle
import subprocess
import sys
import threading
import time
from types import ModuleType
from typing import ClassVar

import pytest
from pictures import CLASSES, number_of, numbers, picture, pictures, put
from ranks import make_run
from torch.utils.data import DataLoader

from hpcddp.data import ImageFolder, S3ImageFolder, names, places, reading, stores
from hpcddp.data.node_cache import cache
from hpcddp.data.objects import StoreObject
from hpcddp.data.places import Place
from hpcddp.data.s3 import endpoint, region
from hpcddp.data.store_errors import Trouble
from hpcddp.errors import StoreUnreachable, UserError, install_extra

COUNT = sum(CLASSES.values())
EXPECTED = [(i, label) for i, label in enumerate([0] * 7 + [1] * 5 + [2] * 4)]


@pytest.fixture(scope="module")
def filled(s3_server):
    s3_server.put("images", pictures(prefix="a b/ä/"))
    return s3_server


@pytest.fixture
def server(filled, monkeypatch):
    """Open the server's door, and set its address in this process."""
    for name, value in filled.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(places, "_down", {})  # a store that failed for good has not answered again
    filled.door.open()
    yield filled
    filled.door.open()


@pytest.fixture
def root(server):
    return "s3://images/a b/ä"


def test_the_same_images_from_a_folder_s3_and_fsspec(root, tmp_path):
    import fsspec

    put(tmp_path, pictures())
    memory = fsspec.filesystem("memory")
    for name, data in pictures(prefix="/pics/").items():
        memory.pipe(name, data)
    for place in (tmp_path, f"file://{tmp_path}", root, root + "/", "memory://pics"):
        dataset = ImageFolder(place)
        assert numbers(dataset) == EXPECTED, place
        assert dataset.classes == list(CLASSES) and dataset.class_to_idx["dog"] == 1
        assert (
            dataset.targets.tolist() == [label for _, label in EXPECTED] and dataset.groups is None
        )
        assert number_of(dataset[-1][0]) == COUNT - 1
        with pytest.raises(IndexError):
            dataset[COUNT]


def test_dask_pytorch_ddps_constructor_and_transforms(root):
    dataset = S3ImageFolder("images", "a b/ä/", number_of, lambda target: target * 10)
    assert [dataset[i] for i in (0, 7, 12)] == [(0, 0), (7, 10), (12, 20)]


class Numbers:
    """A transform that spawned processes can import."""

    def __call__(self, image):
        return number_of(image)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_loader_processes_read_after_their_parent_has(root, context):
    dataset = ImageFolder(root, Numbers())
    assert dataset[3] == (3, 0)
    dataset.prefetch(range(8))  # threads and a client are at work while the fork happens
    loader = DataLoader(dataset, batch_size=4, num_workers=2, multiprocessing_context=context,
                        timeout=60)  # fmt: skip
    read = [
        row
        for images, labels in loader
        for row in zip(images.tolist(), labels.tolist(), strict=True)
    ]
    assert read == EXPECTED
    assert dataset[5] == (5, 0)


def test_a_dataset_is_plain_data(root):
    dataset = ImageFolder(root, Numbers())
    dataset.prefetch([1, 2])
    assert pickle.loads(pickle.dumps(dataset))[2] == (2, 0)


def test_what_is_fetched_ahead_is_fetched_once_and_at_the_same_time(root, server):
    dataset = ImageFolder(root, Numbers())
    dataset[0]
    before = server.door.requests
    dataset.prefetch(range(COUNT))
    for _ in range(3):  # a sample that uses random numbers is read again
        assert [dataset[i] for i in range(COUNT)] == EXPECTED
    assert server.door.requests - before == COUNT
    assert dataset.__getitems__(list(range(COUNT))) == EXPECTED
    assert server.door.requests - before == COUNT
    dataset.prefetch([0, 1, 2, 3, 9])  # samples of both batches are kept
    assert dataset[9] == (9, 1) and server.door.requests - before == COUNT
    dataset.prefetch([])
    assert dataset[4] == (4, 0) and server.door.requests - before == COUNT + 1


def test_no_more_is_fetched_ahead_than_there_is_room_for(root, server, monkeypatch):
    dataset = ImageFolder(root, Numbers())
    sizes = dataset._listing.size.tolist()
    monkeypatch.setattr(reading, "AHEAD", sum(sizes[:5]))
    before = server.door.requests
    dataset.prefetch(range(COUNT))
    assert [dataset[i] for i in range(5)] == EXPECTED[:5]
    assert server.door.requests - before == 5
    assert dataset.__getitems__(list(range(COUNT))) == EXPECTED


BAD = {
    "s3://no-such-bucket/x": "no such bucket",
    "s3://images/nothing": "no files found",
    "s3://images/a b/ä/cat/deep/er": "no class folders found",
    "memory://nothing-at-all": "no files found",
    "s3://": "the URL names no bucket",
    "nosuchstore://x/y": "unsupported store",
}


@pytest.mark.parametrize("place", BAD)
def test_a_place_without_images_is_told_at_once(server, place):
    with pytest.raises(UserError, match=BAD[place]) as error:
        ImageFolder(place)
    assert error.value.where.startswith(place) and error.value.hint


def test_a_password_in_a_url_is_refused_and_not_shown(tmp_path, monkeypatch):
    run = make_run(tmp_path / "job")
    monkeypatch.setenv("HPCDDP_RUN_DIR", str(run.path))
    for address in ("me:{}@host", "me:{}@host:22", ":{}@host", "memory://::x://me:{}@host"):
        for secret in ("geheim", "ge@heim", "ge:heim", "ge/h+heim", "/geheim/x"):
            with pytest.raises(UserError, match="contains a password") as error:
                ImageFolder(f"memory://{address.format(secret)}/x/y")
            message = str(error.value)
            assert "heim" not in message and "host" in message and "FSSPEC_" in message
    assert not run.listings.exists()
    with pytest.raises(UserError, match="contains a password") as error:  # before a run is made
        names.check(["/proj/x", "sftp://me:geheim@host/pets"], {}, {})
    assert error.value.where == "data.stage" and "geheim" not in str(error.value)
    for given in (
        "db://me:geheim@host/x",
        ["/x", "db://me:geheim@host/x"],
        {"x": "db://a:geheim@b"},
    ):
        with pytest.raises(UserError, match="contains a password") as error:
            names.check([], {"given": given}, {"dataset.given": "--set dataset.given"})
        assert error.value.where == "--set dataset.given" and "geheim" not in str(error.value)
    signed = "https://host/pets.tar?X-Amz-Date=1&X-Amz-Signature=geheim&x=1"
    with pytest.raises(
        UserError, match=r"&X-Amz-Signature=\*\*\*&x=1 contains a signature"
    ) as error:
        names.check([signed], {}, {})
    assert "geheim" not in str(error.value)
    for plain in ("abfs://images@account/x", "hdfs://me@host:8020/x", "s3://b/a:b@c", "/a:b@c/d",
                  "hdfs://host:8020/x@y", "zip://x::abfs://images@account/x",
                  "https://h/x?tokenizer=b"):  # fmt: skip
        assert Place.of(plain, 1).root == plain


def test_in_a_run_a_node_fetches_an_image_once(root, server, tmp_path, monkeypatch):
    """The node's cache serves all processes; a changed image is fetched again."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("SLURM_TMPDIR", raising=False)
    monkeypatch.setattr(cache, "_shared", None)
    for number, fetched in ((1, COUNT), (2, 0)):
        run = make_run(tmp_path / f"job-{number}")
        monkeypatch.setenv("HPCDDP_RUN_DIR", str(run.path))
        dataset = ImageFolder(root, number_of)
        before = server.door.requests
        assert dataset.__getitems__(list(range(COUNT))) == EXPECTED
        assert server.door.requests - before == fetched
    name, data = "a b/ä/cat/a000 ü.png", pictures()["cat/a000 ü.png"]
    put_back = {"Bucket": "images", "Key": name}
    server.client().put_object(Body=picture(300), **put_back)
    try:
        run = make_run(tmp_path / "job-3")
        monkeypatch.setenv("HPCDDP_RUN_DIR", str(run.path))
        assert ImageFolder(root, number_of)[0] == (300, 0)
    finally:
        server.client().put_object(Body=data, **put_back)


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (403, "InvalidAccessKeyId"),
        (403, "SignatureDoesNotMatch"),
        (403, "AccessDenied"),
        (400, "ExpiredToken"),
        (400, "InvalidToken"),
    ],
)
def test_wrong_credentials_are_told_at_once_and_not_shown(root, server, capfd, status, code):
    server.door.answer(status, code)
    words = "access denied" if code == "AccessDenied" else "invalid credentials"
    with pytest.raises(UserError, match=words) as error:
        ImageFolder(root)
    assert error.value.where == root
    assert "testing" not in str(error.value) + "".join(capfd.readouterr())


NO_KEYS = """
from hpcddp.data import ImageFolder
from hpcddp.errors import UserError
try:
    ImageFolder("s3://images/x")
except UserError as error:
    print(error)
"""


def test_missing_credentials_are_told_and_what_to_set(server, tmp_path):
    environ = {k: v for k, v in os.environ.items() if "KEY" not in k} | {"HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", NO_KEYS], env=environ, text=True, check=False,
                          capture_output=True)  # fmt: skip
    assert "no credentials found" in done.stdout, done.stderr
    assert "AWS_ACCESS_KEY_ID" in done.stdout


def test_an_extra_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(stores, "_opened", {})
    absent = ("s3torchconnector", "fsspec")

    class Finder:
        @staticmethod
        def find_spec(name, path, target=None):
            if name in absent:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for name in list(sys.modules):
        if name == "hpcddp.data.s3" or name.partition(".")[0] in absent:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    for place, extra in (("s3://images/x", "s3"), ("memory://x", "stores")):
        with pytest.raises(UserError, match="is not installed") as error:
            ImageFolder(place)
        assert error.value.hint == install_extra(extra)


@pytest.mark.parametrize("place", [None, ModuleType("s3torchconnector._s3client")])
def test_an_extra_that_is_here_but_of_no_use_is_told_as_what_it_is(monkeypatch, place):
    """Such as an incompatible version, or a library that does not load."""
    monkeypatch.setattr(stores, "_opened", {})
    monkeypatch.delitem(sys.modules, "hpcddp.data.s3", raising=False)
    monkeypatch.setitem(sys.modules, "s3torchconnector._s3client", place)
    with pytest.raises(
        UserError, match=r"cannot load s3torchconnector: .*s3torchconnector._s3client"
    ) as error:
        ImageFolder("s3://images/x")
    assert "the extra `s3`" in error.value.hint


def outage(server, root, seconds, capfd):
    """Read everything through a door that is shut for a while; return the printed lines."""
    dataset = ImageFolder(root, Numbers())
    dataset[0]
    capfd.readouterr()
    timer = server.door.shut_for(seconds)
    assert dataset.__getitems__(list(range(COUNT))) == EXPECTED
    timer.join()
    return capfd.readouterr().err.splitlines()


def test_a_store_that_is_down_for_a_while_is_waited_for_and_told_once(root, server, capfd):
    first, *rest = outage(server, root, 3, capfd)
    assert first.startswith("s3://images does not answer (") and "for up to 240 s" in first
    # The client also removes the address of a refusing server from its DNS cache.
    assert any(word in first for word in ("refused", "failed to resolve")) and len(rest) == 1
    assert rest[0].startswith("s3://images answers again after ")


@pytest.mark.full
def test_a_store_that_is_down_for_half_a_minute_is_waited_for(root, server, capfd):
    assert len(outage(server, root, 30, capfd)) == 2


@pytest.mark.parametrize("status", [500, 503])
def test_errors_of_the_server_are_waited_for(root, server, status):
    dataset = ImageFolder(root, Numbers())
    server.door.answer(status)
    timer = threading.Timer(1.5, server.door.open)
    timer.start()
    assert dataset[2] == (2, 0) and server.door.refused
    timer.join()


def test_patience_ends(root, server):
    dataset = ImageFolder(root, retry_seconds=0.5)
    server.door.shut()
    with pytest.raises(
        StoreUnreachable, match=r" for 0\.5 s: .*(refused|failed to resolve)"
    ) as error:
        dataset[0]
    assert error.value.where.startswith(root) and "data.retry_seconds" in error.value.hint


class Cut:
    """A store that cuts its answers after each of these numbers of items, and then none."""

    cuts: ClassVar[list[int]] = []

    def __init__(self, root):
        pass

    def stream(self, name):
        cut = self.cuts.pop(0) if self.cuts else 99
        for i in range(6):
            if i == cut:
                raise Trouble("down", "reset")
            time.sleep(0.1)
            yield b"%d" % i

    def find(self):
        return (StoreObject(data.decode()) for data in self.stream(""))


def test_patience_is_with_silence_and_not_with_long_answers(monkeypatch):
    monkeypatch.setitem(stores.STORES, "cut", Cut)
    place, out = Place.of("cut://x", 0.3), io.BytesIO()
    monkeypatch.setattr(Cut, "cuts", [1, 5, 4])  # there is at least half a second between the cuts
    place.copy("y", out)
    assert out.getvalue() == b"012345"
    monkeypatch.setattr(Cut, "cuts", [1, 5, 4])
    assert [item.name for item in place.find()] == list("012345")


def test_a_call_that_failed_before_another_was_answered_says_nothing(monkeypatch, capfd):
    monkeypatch.setattr(places, "_down", {})
    place, began = Place.of("cut://x", 9), time.monotonic()
    place._silent("reset", began, time.monotonic())
    place._speaks()
    place._silent("reset", began, time.monotonic())  # a thread that notices the failure late
    place._silent("reset", time.monotonic(), time.monotonic())
    words = [line.partition("cut://x ")[2] for line in capfd.readouterr().err.splitlines()]
    assert [line.split()[0] for line in words] == ["does", "answers", "does"]


def test_an_answer_that_is_always_cut_is_not_waited_for_without_end(monkeypatch):
    monkeypatch.setitem(stores.STORES, "cut", Cut)
    monkeypatch.setattr(places, "VAIN", 3)
    monkeypatch.setattr(Cut, "cuts", [1] * 99)
    with pytest.raises(StoreUnreachable, match=r"does not answer for 0\.4 s: reset"):
        Place.of("cut://x", 0.4).copy("y", io.BytesIO())
    assert len(Cut.cuts) > 80


def test_an_object_that_was_taken_away_is_named(server, root):
    dataset = ImageFolder(root)
    name = "a b/ä/cat/a000 ü.png"
    data = pictures()["cat/a000 ü.png"]
    server.client().delete_object(Bucket="images", Key=name)
    try:
        with pytest.raises(UserError, match="not found") as error:
            dataset[0]
        assert error.value.where == f"s3://images/{name}"
        skipping = ImageFolder(root, on_bad="skip")
        assert len(skipping) == COUNT - 1
    finally:
        server.client().put_object(Bucket="images", Key=name, Body=data)


def test_one_object_that_may_not_be_read_is_skipped_and_wrong_keys_are_not(server, root, capfd):
    dataset = ImageFolder(root, number_of, on_bad="skip")
    server.door.answer(403, "AccessDenied", to="cat/a000")
    assert [dataset[i] for i in (0, 1)] == [(1, 0), (1, 0)]
    (said,) = capfd.readouterr().err.splitlines()
    assert said.startswith("skipped s3://images/a b/ä/cat/a000 ü.png: access denied")
    for status, code in (
        (403, "InvalidAccessKeyId"),
        (403, "SignatureDoesNotMatch"),
        (400, "ExpiredToken"),
        (400, "InvalidToken"),
    ):
        server.door.answer(status, code, to="cat/a000")
        with pytest.raises(UserError, match="invalid credentials") as error:
            dataset[0]
        assert error.value.where.endswith("cat/a000 ü.png") and "skipped" not in str(error.value)


def test_address_and_region_come_from_where_awss_tools_look(tmp_path):
    config = tmp_path / "config"
    config.write_text(
        "[default]\nregion = eu-1\n[profile lab]\nregion=lab-2\nendpoint_url=http://x\n"
    )
    given = {"AWS_CONFIG_FILE": str(config)}
    assert (region(given), endpoint(given)) == ("eu-1", "")
    lab = given | {"AWS_PROFILE": "lab"}
    assert (region(lab), endpoint(lab)) == ("lab-2", "http://x")
    assert region(lab | {"AWS_DEFAULT_REGION": "y"}) == "y"
    assert endpoint(lab | {"AWS_ENDPOINT_URL": "http://z"}) == "http://z"
    assert region({"AWS_CONFIG_FILE": str(tmp_path / "none")}) == "us-east-1"
