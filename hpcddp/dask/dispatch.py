"""``run`` with the name and the arguments of dask-pytorch-ddp."""

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
    """Start a function on every worker, as the ranks of one process group, without waiting.

    The same as ``hpcddp.dask.start``, with the arguments of dask-pytorch-ddp.

    Args:
        client: Client of a Dask cluster on whose workers hpcddp is installed.
        pytorch_function: Called on every rank with ``args`` and ``kwargs``.
        backend: Backend of the process group. Default: NCCL where each rank has its own GPU, else
            gloo.
        pass_local_rank: Also pass ``local_rank`` to the function, as a keyword argument.

    Returns:
        The ranks, for ``DaskResultsHandler.process_results``. Their ``results()`` waits, and
        returns the ranks' return values.

    Raises:
        UserError: As ``hpcddp.dask.start``.
    """
    fn = _with_local_rank(pytorch_function) if pass_local_rank else pytorch_function
    return start(client, fn, *args, backend=backend, **kwargs)


def _with_local_rank(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, local_rank=int(os.environ["LOCAL_RANK"]), **kwargs)

    return call
