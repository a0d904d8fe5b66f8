"""Compares a run's newest checkpoint with the model that its job makes now, by names and shapes.

``python -m hpcddp.train.model_match`` answers hpcddp.submit.resume_check. The model's tensors have
shapes and no values, so the check needs neither the model's memory nor a GPU nor data.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hpcddp import spec as specs
from hpcddp.errors import CheckpointError, CheckpointForeign, JobFileError
from hpcddp.rundir import RunDir
from hpcddp.train.checkpoint import checkpoint
from hpcddp.train.parallel import state_dict
from hpcddp.train.query_answer import answer
from hpcddp.train.rank import task_module as tasks
from hpcddp.train.rank.task_module import Task


def compare(spec: dict[str, Any], workdir: str, run: str) -> dict[str, Any]:
    """The comparison: ``unknown`` is the reason why none was possible, or "".

    Raises:
        CheckpointForeign: the checkpoint is of another model or format.
        JobFileError: model() cannot be called with the job's values.
    """
    try:
        folder = next(iter(checkpoint.complete(RunDir(run).checkpoints)), None)
        if folder is None:
            return {"unknown": "the run has no complete checkpoint"}
        checkpoint.read_meta(folder)
        checkpoint.check_names(folder, sizes(_load(specs.from_dict(spec), workdir)))
    except (CheckpointForeign, JobFileError):
        raise
    except CheckpointError as error:  # damaged: the ranks use an older one
        return {"unknown": error.what}
    except Exception as error:
        return {"unknown": f"{type(error).__name__}: {error}".partition("\n")[0]}
    return {"unknown": ""}


def _load(job: specs.JobSpec, workdir: str) -> Task:
    """The task. A missing module may exist on the nodes, so it is no error here."""
    try:
        return tasks.load(job, workdir)
    except JobFileError as error:
        raise ImportError(error.what) from None


def sizes(task: Task) -> dict[str, torch.Size]:
    """The sizes of the model's tensors. On the meta device a model cannot move to another device;
    as fake tensors it cannot convert, as by ``double()``. So the second follows the first."""
    try:
        with torch.device("meta"):
            return state_dict.sizes(task.model())
    except JobFileError:
        raise
    except Exception:
        with FakeTensorMode(allow_non_fake_inputs=True):
            return state_dict.sizes(task.model())


if __name__ == "__main__":
    answer(compare)
