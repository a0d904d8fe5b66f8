"""Step 10: checkpoints that are complete or do not exist.

    checkpoints/step-N/
      __R_0.distcp     rank R's tensors, written by torch.distributed.checkpoint
      .metadata        the index of the tensors
      meta.json        step, epoch, samples consumed, world, seed, schedule, versions
      COMPLETE         the files' sizes and SHA-256, written last

A framework's own files may be there instead of the tensors; meta.json then names it in ``files``.
A save writes a hidden folder beside, fsyncs it, and renames it (publish.py). A folder without
COMPLETE, or with other file sizes, is damaged (damage.py): no training uses or removes it.
newest.py chooses the checkpoint to resume from.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hpcddp.errors import CheckpointError, CheckpointForeign
from hpcddp.rundir import step_folders
from hpcddp.rundir import step_of as step_of
from hpcddp.train.checkpoint import damage
from hpcddp.train.checkpoint.damage import FORMAT
from hpcddp.train.checkpoint.disk_retry import DiskRetry

if TYPE_CHECKING:
    from hpcddp.train.checkpoint import dcp_files

NAMED = 3  # most tensors named in an error


def old(folder: Path) -> Path:
    """The name of a checkpoint while another one replaces it."""
    return folder.with_name(f".{folder.name}.old")


def steps(checkpoints: Path) -> list[int]:
    """The steps of a run's checkpoints, newest first, damaged ones included.

    Raises:
        OSError: the folder cannot be read.
    """
    numbers = {step for path in step_folders(checkpoints) if (step := step_of(path)) is not None}
    return sorted(numbers, reverse=True)


def find(checkpoints: Path, step: int) -> tuple[Path, str]:
    """The folder of a step's checkpoint, and its damage by the file sizes, or "".

    Raises:
        OSError: the folder cannot be read.
    """
    folder, wrong = checkpoints / f"step-{step}", ""
    for path in (folder, old(folder), folder):  # twice: it may be replaced meanwhile
        reason = damage.of_sizes(path)
        if not reason:
            return path, ""
        wrong = wrong or reason
    return folder, wrong


def complete(checkpoints: Path) -> list[Path]:
    """The complete checkpoints of a run, newest first.

    Raises:
        OSError: one cannot be read, so it is unknown whether it is complete.
    """
    judged = (find(checkpoints, step) for step in steps(checkpoints))
    return [path for path, wrong in judged if not wrong]


def read_meta(folder: Path) -> dict[str, Any]:
    """A checkpoint's meta.json.

    Raises:
        CheckpointForeign: another format wrote it.
        OSError: it cannot be read.
    """
    meta = damage.meta(folder)
    if meta.get("format") != FORMAT:
        damaged = type(meta.get("format")) is not int  # it was damaged after the check
        raise (CheckpointError if damaged else CheckpointForeign)(
            f"the checkpoint has format {meta.get('format')}, expected format {FORMAT}",
            where=str(folder),
            hint="use the version of hpcddp that wrote it",
        )
    return meta


def load(folder: Path, tensors: Mapping[str, Tensor], retry: DiskRetry) -> None:
    """Fill the tensors of this rank, whole ones or ``dcp_files.Slice``, in place; a collective."""
    from hpcddp.train.checkpoint import dcp_files

    index = retry.read(lambda: dcp_files.read_metadata(folder))
    retry.read(lambda: dcp_files.read(folder, index, tensors, retry.world.control))


def check_names(
    folder: Path, sizes: Mapping[str, torch.Size], shapes: dcp_files.Shapes | None = None
) -> set[str]:
    """All names in a checkpoint; CheckpointForeign if it is of another model.

    Args:
        sizes: the sizes of all the model's tensors, by name.
        shapes: those of the checkpoint, if they were read before.
    """
    from hpcddp.train.checkpoint import dcp_files

    shapes = shapes or dcp_files.shapes(folder)
    theirs = {n: shape for n, (shape, _) in shapes.items() if n.startswith("model.")}
    differ = [n for n in sorted(sizes.keys() | theirs.keys()) if sizes.get(n) != theirs.get(n)]
    if differ:
        differences = [
            f"{n} is {_shape(theirs.get(n))} in the checkpoint "
            f"and {_shape(sizes.get(n))} in the model"
            for n in differ[:NAMED]
        ]
        more = f"; and {len(differ) - NAMED} more" if len(differ) > NAMED else ""
        raise CheckpointForeign(
            f"the checkpoint is of another model: {'; '.join(differences)}{more}",
            where=str(folder),
            hint="restore the model's code and the keys of [model], or submit a new run",
        )
    return set(shapes)


def _shape(size: torch.Size | None) -> str:
    return "missing" if size is None else str(list(size))
