"""How many processes read: chosen where nobody says, after a look that the training cannot see."""

import os
import random
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from pictures import pictures, put
from ranks import make_run, one_rank, records
from torch.utils.data import Dataset

from hpcddp.data import ImageFolder, stores
from hpcddp.data.node_cache.cache import Cache
from hpcddp.topology import Rank
from hpcddp.train.input import loading
from hpcddp.train.input.loading import hint, is_far, is_quick
from hpcddp.train.monitor import slow_ranks


@pytest.fixture(autouse=True)
def busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests share their cores: what is quick takes longer there."""
    monkeypatch.setattr(loading, "QUICK", 0.02)


class Numbers(Dataset[Any]):
    """Draws from two generators and one of its own, and may take its time."""

    def __init__(self, pause: float = 0.0) -> None:
        self.pause, self.read = pause, 0
        self.own = random.Random(0)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        time.sleep(self.pause)
        return torch.rand(2) * index * random.random() * self.own.random()


class Noted(Numbers):
    """Each read is a byte in a file."""

    def __init__(self, pause: float, file: Path) -> None:
        super().__init__(pause)
        self.file = file

    def __getitem__(self, index: int) -> Any:
        with self.file.open("ab") as file:
            file.write(b".")
        return super().__getitem__(index)


class FromAStore(Numbers):
    def prefetch(self) -> None:
        """As a dataset that reads from a store has it."""


class Raises(Numbers):
    def __getitem__(self, index: int) -> Any:
        raise OSError("gone")


def test_data_in_memory_is_quick_and_what_takes_its_time_is_not() -> None:
    batches = [list(range(8 * i, 8 * i + 8)) for i in range(8)]
    assert is_quick(Numbers(), batches, 0) and is_quick(Numbers(), batches[:1], 0)
    assert not is_quick(Numbers(0.05), batches, 0)
    assert not is_quick(Numbers(0.004), batches, 0)  # all of a batch together
    ahead = Numbers()
    ahead.prefetch = 4  # of its own, and no store
    assert is_quick(ahead, batches, 0)


def test_what_takes_too_long_for_a_look_is_not_quick(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The look ends early: after a first sample, which may open files and is read twice to see what
    is drawn, and another one."""
    reads = tmp_path / "reads"
    monkeypatch.setattr(loading, "LOOK_SECONDS", 0.05)
    assert not is_quick(Noted(0.1, reads), [list(range(8))] * 8, 0)
    assert len(reads.read_bytes()) == 3
    monkeypatch.setattr(loading, "PATIENCE", 0.3)
    assert not is_quick(Numbers(60), [list(range(8))], 0)


def test_the_training_does_not_see_the_look() -> None:
    dataset = Numbers()
    torch.manual_seed(3)
    random.seed(3)
    before = torch.get_rng_state(), random.getstate(), dataset.own.getstate()
    is_quick(dataset, [[1, 2, 3], [4, 5]], 0)
    after = torch.get_rng_state(), random.getstate(), dataset.own.getstate()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
    assert dataset.read == 0


def test_a_store_is_not_looked_at_and_what_cannot_be_read_elsewhere_gets_no_processes() -> None:
    assert not is_quick(FromAStore(), [[0]], 0)
    assert is_quick(Raises(), [[0]], 0)


PAUSED = """
import os, time
from pathlib import Path
_dataset = dataset
class Slow(torch.utils.data.Dataset):
    def __init__(self, inner):
        self.inner = inner
    def __len__(self):
        return len(self.inner)
    def __getitem__(self, index):
        time.sleep(PAUSE)
        Path(__file__).with_name(f"read-by-{os.getpid()}").touch()
        return self.inner[index]
def dataset(split, held_out=0):
    return Slow(_dataset(split)) if split == "train" else None
"""


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of eight CPUs."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


@pytest.mark.parametrize(("pause", "workers"), [(0.0, 0), (0.03, 2)])
def test_a_run_chooses_and_goes_on_with_its_choice_and_as_many_threads_compute_whatever_it_is(
    tmp_path: Path, eight: None, monkeypatch: pytest.MonkeyPatch, pause: float, workers: int,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Its processes and its threads are no more than its CPUs. Results on a CPU depend on the
    threads in their last bit, and not on how quick the data was."""
    extra = PAUSED.replace("PAUSE", str(pause))
    run = make_run(tmp_path, extra=extra, dataset__held_out=0, checkpoint__best="")
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(8)
        one_rank(run, max_steps=3)
        (start,) = records(run, "start")
        assert (start["cpus"], start["workers"], start["threads"]) == (8, workers, 6)
        assert torch.get_num_threads() == start["threads"]
        assert ("2 of 8 CPUs read data" in capsys.readouterr().out) == (workers > 0)
        pids = {path.name.removeprefix("read-by-") for path in tmp_path.glob("read-by-*")}
        assert len(pids - {str(os.getpid())}) >= workers
        assert (str(os.getpid()) in pids) == (workers == 0)

        def again(*_: Any) -> bool:
            raise AssertionError("it was looked at")

        monkeypatch.setattr(loading, "is_quick", again)
        one_rank(run, 2)
        (start,) = records(run, "start", 2)
        assert (start["workers"], start["threads"]) == (workers, 6)
    finally:
        torch.set_num_threads(threads)


def test_the_hint_follows_from_the_facts() -> None:
    assert "cpus-per-task=4" in hint(0, 1)
    assert hint(0, 2).endswith("set data.workers to 1")
    assert "data.workers is 2 of 8 CPUs: try 4" in hint(2, 8)
    assert "num_workers is 6 of 8 CPUs: try 7" in hint(6, 8, key="num_workers")
    full = hint(7, 8)
    assert "7 of 8 CPUs: if all are busy" in full and "cpus-per-task=16" in full
    assert "data.cache" in hint(2, 8, far=True) and "data.stage" in hint(7, 8, far=True)


def test_a_dataset_tells_whether_its_samples_come_from_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not when the node's cache has all of them, once they were read."""
    monkeypatch.setattr(stores, "VERSIONS", ("created",))  # of the store that is in memory
    objects = pictures()
    found = ImageFolder(put(tmp_path / "images", objects), cache=Cache(Path(), 0))
    assert not is_far(found, again=False) and not is_far(found, again=True)
    fsspec.filesystem("memory").pipe({f"/far/{name}": data for name, data in objects.items()})
    size = sum(len(data) for name, data in objects.items() if " ü" in name)

    def at(again: bool, cache: Cache | None) -> bool:
        return is_far(ImageFolder("memory://far", cache=cache), again=again)

    fits, tight = Cache(tmp_path, size), Cache(tmp_path, size - 1)
    assert at(False, fits) and not at(True, fits)
    assert at(True, tight) and at(True, Cache(Path(), 0)) and at(True, None)
    with monkeypatch.context() as patch:  # of two nodes: each has read other images
        for name, value in Rank(2, 4, 0, 2, 1).to_env().items():
            patch.setenv(name, value)
        assert at(True, fits)
    monkeypatch.setattr(stores, "VERSIONS", ())  # what may change unseen is not kept
    assert at(True, fits)
    assert not is_far(FromAStore(), again=False)  # who does not tell it


FAR = """
_dataset = dataset
class Far(torch.utils.data.TensorDataset):
    def far(self, *, again):
        return not again
def dataset(split, held_out=0):
    return Far(*_dataset(split, 24).tensors) if split == "train" else None
"""


def test_a_run_that_waits_for_a_store_is_told_so_until_all_of_it_was_read(
    tmp_path: Path, eight: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any wait is told here."""
    for name in ("SHARE", "LEAST", "WORSE"):
        monkeypatch.setattr(slow_ranks, name, -1.0)
    run = make_run(tmp_path, extra=FAR, dataset__held_out=0, data__workers=1, epochs=2,
                   max_steps=0, checkpoint__best="", checkpoint__every=0)  # fmt: skip
    threads = torch.get_num_threads()
    try:
        one_rank(run)
    finally:
        torch.set_num_threads(threads)
    told = {r["step"]: r["hint"] for r in records(run, "waiting")}
    assert told[4] == hint(1, 8, far=True)  # of six steps an epoch
    assert told[8] == told[12] == hint(1, 8)
