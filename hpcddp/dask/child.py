"""A rank of ``run``, a child process of its Dask worker: python -P -m hpcddp.dask.child PIPE"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import NoReturn

from hpcddp.attempt.error_record import host, kind_of
from hpcddp.dask import results
from hpcddp.dask.results import Outbox
from hpcddp.dask.task import Job, RankAnswer
from hpcddp.processes import die_with_parent


def call(job: Job) -> bytes:
    """Start the process group, call the function, and end the group; return its pickled result."""
    import cloudpickle
    import torch
    import torch.distributed as dist

    fn, args, kwargs = pickle.loads(job.call)
    dist.init_process_group(job.backend or _backend(job))
    value = fn(*args, **kwargs)
    result: bytes = cloudpickle.dumps(value)
    if dist.is_initialized():  # the function may have ended it
        if torch.cuda.is_available() and dist.get_backend() == "nccl":
            dist.barrier(device_ids=[torch.cuda.current_device()])
        else:
            dist.barrier()  # a rank that ends early can break the others' last collective
        dist.destroy_process_group()
    return result


def _backend(job: Job) -> str:
    import torch

    return "nccl" if job.gpus and torch.cuda.is_available() else "gloo"


def main(pipe: int) -> NoReturn:
    """Call the function, send the answer, and end at once: a normal exit can hang in a process
    group that lost a rank."""
    die_with_parent()
    results.outbox = outbox = Outbox(Connection(pipe))
    sys.path[:], job = outbox.receive()
    sys.path += [folder for folder in job.path if folder not in sys.path]
    try:
        answer = RankAnswer(job.rank.world_rank, call(job))
    except BaseException as error:
        peer = kind_of(error, stepped=True) == "peer"
        answer = RankAnswer.failure(job.rank, host(), f"failed\n{_traceback(error)}", peer=peer)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    outbox.answer(answer)
    os._exit(bool(answer.error))


def _traceback(error: BaseException) -> str:
    """A traceback that starts at the user's function, if the error came from it."""
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    lines = traceback.format_exception(type(error), error, trace or error.__traceback__)
    return "".join(lines).rstrip()


if __name__ == "__main__":
    main(int(sys.argv[1]))
