"""The imports of a rank before its first step."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


def preload(*, task: bool) -> None:
    """Import all that a rank needs until its first step.

    Args:
        task: the ranks train a task; else they run a script of their own.
    """
    with _uncollected():
        import torch
        import torch.distributed
        import torch.nn.parallel
        import torch.utils.data

        weight = torch.nn.Parameter(torch.zeros(()))
        weight.grad = torch.zeros(())
        torch.optim.SGD([weight]).step()  # imports much more; Adam's step would look for a GPU
        if task:
            import hpcddp.train.job  # noqa: F401


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Keep Python's garbage collector from looking at the objects of modules, now and later: they
    stay. It would take a fifth of the time of the imports."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
