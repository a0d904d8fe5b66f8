"""Loaders: how their processes begin and end."""

import gc
import os
import subprocess
import sys
import threading

import pytest
import torch
from ranks import make_run, one_rank
from torch.utils.data import Dataset, TensorDataset

from hpcddp.errors import JobFileError
from hpcddp.train.input import data_workers


@pytest.mark.timeout(30)
@pytest.mark.parametrize("stuck", [False, True])
def test_the_thread_that_pins_memory_ends_before_the_processes_it_reads_from(monkeypatch, stuck):
    """It stands for torch's own, which there is with a GPU only."""
    monkeypatch.setattr(data_workers, "PIN_SECONDS", 0.2 if stuck else 20)
    loader = data_workers.make_loader(TensorDataset(torch.arange(8.0)), 1, torch.device("cpu"))
    iterator = iter(loader)
    next(iterator)
    over, alive = threading.Event(), []

    def pin():
        while stuck or not over.is_set():
            iterator._worker_result_queue.get()

    thread = threading.Thread(target=pin, daemon=True)
    thread.start()
    iterator._pin_memory_thread, iterator._pin_memory_thread_done_event = thread, over
    (process,) = iterator._workers
    kill = process.kill
    process.kill = lambda: (alive.append(thread.is_alive()), kill())
    data_workers.end_workers(loader)
    assert alive == [stuck] and not process.is_alive()


class Garbage:
    """What nothing but itself refers to; it notes in which process it ends."""

    def __init__(self, path):
        self.path, self.me = path, self

    def __del__(self):
        with open(self.path, "a") as file:
            file.write(f"{os.getpid()}\n")


class Collects(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        gc.collect()
        return index


def test_a_process_collects_nothing_of_its_parent(tmp_path):
    path = tmp_path / "ended"
    loader = data_workers.make_loader(
        Collects(), 1, torch.device("cpu"), multiprocessing_context="fork"
    )
    gc.disable()
    try:
        Garbage(path)
        assert [batch.tolist() for batch in loader] == [[0]]
    finally:
        gc.enable()
    data_workers.end_workers(loader)
    gc.collect()
    assert path.read_text() == f"{os.getpid()}\n"


TELLS = """
from hpcddp.errors import JobFileError

class Tells(TensorDataset):
    def __getitem__(self, index):
        if index == 5:
            raise JobFileError("there is no image 5", where="s3://bucket", hint="put it there")
        return super().__getitem__(index)

_dataset = dataset
def dataset(split, bad):
    whole = _dataset(split)
    return Tells(*whole.tensors) if split == bad else whole
"""


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("split", ["train", "eval"])
def test_an_error_of_a_worker_process_is_told_as_it_was_raised(tmp_path, split, workers):
    keys = {"epochs": 1, "max_steps": 0, "dataset": {"bad": split}}
    run = make_run(tmp_path, extra=TELLS, data__workers=workers, **keys)
    with pytest.raises(JobFileError) as caught:
        one_rank(run)
    assert str(caught.value) == "s3://bucket: there is no image 5\n  put it there"


EARLY = """
import os, signal, torch
from torch.utils.data import TensorDataset
from hpcddp.train.input.data_workers import end_workers, make_loader, read
os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))
data = TensorDataset(torch.arange(8))
loader = make_loader(data, 2, torch.device("cpu"), batch_size=2, generator=torch.Generator())
print(sum(int(batch[0].sum()) for batch in read(loader)))
end_workers(loader)
"""


def test_a_stop_signal_does_not_end_a_process_that_has_just_begun_to_read():
    done = subprocess.run(
        [sys.executable, "-c", EARLY], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "28\n", done.stderr
