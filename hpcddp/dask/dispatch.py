"""``run`` under the name and with the arguments that users of dask-pytorch-ddp know."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hpcddp.dask.ranks import Ranks, start

if TYPE_CHECKING:
    from distributed import Client


def run(
    client: Client,
    pytorch_function: Callable[..., Any],
    *args: Any,
    backend: str = "",
    pass_local_rank: bool = False,
    **kwargs: Any,
) -> Ranks:
    """Start a function on every worker, as the ranks of a process group, and do not wait:
    ``hpcddp.dask.start``. Its result is for ``DaskResultsHandler.process_results``, and its own
    ``results()`` waits and returns what the ranks returned.

    Args:
        backend: of the process group; NCCL where each rank has a GPU of its own, else gloo.
        pass_local_rank: the function gets local_rank too, by name.
    """
    fn = _with_local_rank(pytorch_function) if pass_local_rank else pytorch_function
    return start(client, fn, *args, backend=backend, **kwargs)


def _with_local_rank(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, local_rank=int(os.environ["LOCAL_RANK"]), **kwargs)

    return call
