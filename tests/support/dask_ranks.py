"""What ranks on Dask workers do in the tests; imports nothing that a worker lacks."""

import itertools
import os
import signal
import threading
import time
from pathlib import Path


def tell(*args, **kwargs):
    """Where this rank is, and the sum of all ranks."""
    import torch
    import torch.distributed as dist

    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "CUDA_VISIBLE_DEVICES")
    found = {name: os.environ.get(name) for name in names}
    return {**found, "backend": dist.get_backend(), "sum": total.item(), "got": [args, kwargs]}


def submit(handler, count):
    """Many results of each rank, some text, some bytes, and a file; one of them twice."""
    rank = os.environ["RANK"]
    handler.submit_result(f"last-{rank}", "not yet")
    for i in range(count):
        handler.submit_result(f"rank-{rank}/{i}.txt", f"größe {rank} {i}")
    told = from_a_data_worker(handler)
    handler.submit_result(f"last-{rank}", b"\0" + rank.encode())
    handler.submit_result(f"own-{rank}.py", Path(__file__))
    return told


def send_until_it_ends(folder, handler):
    """Rank 0 sends without end, and notes what it has sent; rank 1 is killed meanwhile."""
    sent = Path(folder, "sent")
    if os.environ["RANK"] == "0":
        with sent.open("a", buffering=1) as notes:
            for i in itertools.count():
                handler.submit_result(f"some/{i}", bytes(100_000))
                print(i, file=notes)
    while not sent.exists() or len(sent.read_text().split()) < 20:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def from_a_data_worker(handler):
    """What a process that a rank has forked is told."""
    import multiprocessing

    def send(queue):
        try:
            handler.submit_result("x", "y")
        except Exception as error:
            queue.put(str(error))

    fork = multiprocessing.get_context("fork")
    queue = fork.Queue()
    worker = fork.Process(target=send, args=[queue])
    worker.start()
    told = queue.get()
    worker.join()
    return told


def lock():
    """What this returns cannot be pickled."""
    return threading.Lock()


def up(folder):
    """Say in a file which process is this rank."""
    Path(folder, f"{os.environ['RANK']}-{os.getpid()}").touch()


def wait(folder):
    """Never returns."""
    up(folder)
    time.sleep(600)


def fail(folder, how, handler=None):
    """Rank 1 ends in some way; the others wait for it in a collective."""
    import torch.distributed as dist

    up(folder)
    dist.barrier()
    if os.environ["RANK"] == "1":
        if handler is not None:
            handler.submit_result("before", "it failed")
        if how == "raise":
            raise ValueError("no such luck")
        os.kill(os.getppid() if how == "worker" else os.getpid(), signal.SIGKILL)
    dist.barrier()
    time.sleep(600)
