"""What ranks on Dask workers do in the tests; imports nothing that a worker lacks."""

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
    """Many results of each rank, some text and some bytes."""
    rank = os.environ["RANK"]
    for i in range(count):
        handler.submit_result(f"rank-{rank}/{i}.txt", f"größe {rank} {i}")
    handler.submit_result(f"last-{rank}", b"\0" + rank.encode())


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
