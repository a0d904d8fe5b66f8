"""hpcddp: distributed PyTorch training on Slurm, and the same command on this machine.

For your own training loop: ``attach`` saves and resumes it, ``Sampler`` is a DistributedSampler
that resumes within an epoch, ``init`` starts the process group and names missing ranks.
``submit_result`` writes a file to the run folder.
``hpcddp.lightning`` has the callback for a Lightning Trainer, ``hpcddp.transformers`` that for a
transformers Trainer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcddp.rank_results import submit_result as submit_result
    from hpcddp.train.attach import attach as attach
    from hpcddp.train.attach import init as init
    from hpcddp.train.input.sampler import ResumableSampler as Sampler
    from hpcddp.train.loop import Run as Run

__version__ = "0.1.0"
JOB_FORMAT = 1  # of job.json
__all__ = ["Run", "Sampler", "attach", "init", "submit_result"]

# Name -> module and name there; imported at the first use, since some import torch.
_LAZY = {
    "Run": ("hpcddp.train.loop", "Run"),
    "attach": ("hpcddp.train.attach", "attach"),
    "init": ("hpcddp.train.attach", "init"),
    "Sampler": ("hpcddp.train.input.sampler", "ResumableSampler"),
    "submit_result": ("hpcddp.rank_results", "submit_result"),
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module, own = _LAZY[name]
    return getattr(import_module(module), own)
