"""Step 10: checkpoints that are there wholly or not at all.

    checkpoints/step-N/
      __R_0.distcp     rank R's tensors, written by torch.distributed.checkpoint
      .metadata        which tensor lies where
      meta.json        step, epoch, samples consumed, world, seed, schedule, versions
      COMPLETE         the files' sizes and SHA-256, written last

All of it is written into a hidden folder beside, fsynced, and renamed (publish.py). A folder
without COMPLETE, or whose files have other sizes, is damaged (damage.py): no training goes on from
it, and none removes it. newest.py chooses one to go on from.
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

NAMED = 3  # tensors that an error names


def old(folder: Path) -> Path:
    """The name of a checkpoint while another takes its place."""
    return folder.with_name(f".{folder.name}.old")


def steps(checkpoints: Path) -> list[int]:
    """The steps of a run's checkpoints, newest first, whole or not.

    Raises:
        OSError: that cannot be read.
    """
    numbers = {step for path in step_folders(checkpoints) if (step := step_of(path)) is not None}
    return sorted(numbers, reverse=True)


def find(checkpoints: Path, step: int) -> tuple[Path, str]:
    """The folder of a step's checkpoint, and its damage as its sizes show it.

    Raises:
        OSError: that cannot be read.
    """
    folder, wrong = checkpoints / f"step-{step}", ""
    for path in (folder, old(folder), folder):  # once more: it may be replaced since the first look
        reason = damage.of_sizes(path)
        if not reason:
            return path, ""
        wrong = wrong or reason
    return folder, wrong


def complete(checkpoints: Path) -> list[Path]:
    """The complete checkpoints of a run, newest first.

    Raises:
        OSError: one cannot be read: whether it is complete is not known.
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
        damaged = type(meta.get("format")) is not int  # since it was judged
        raise (CheckpointError if damaged else CheckpointForeign)(
            f"format {meta.get('format')}, but this version reads format {FORMAT}",
            where=str(folder),
            hint="use the hpcddp that wrote it",
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
    """All names in a checkpoint; CheckpointForeign when its model is not this one.

    Args:
        sizes: of all the model's tensors, by name.
        shapes: the folder's, where they were read before.
    """
    from hpcddp.train.checkpoint import dcp_files

    shapes = shapes or dcp_files.shapes(folder)
    theirs = {n: shape for n, (shape, _) in shapes.items() if n.startswith("model.")}
    differ = [n for n in sorted(sizes.keys() | theirs.keys()) if sizes.get(n) != theirs.get(n)]
    if differ:
        differences = [
            f"{n} is {_shape(theirs.get(n))} there and {_shape(sizes.get(n))} here"
            for n in differ[:NAMED]
        ]
        more = f"; and {len(differ) - NAMED} more" if len(differ) > NAMED else ""
        raise CheckpointForeign(
            f"it is of another model: {'; '.join(differences)}{more}",
            where=str(folder),
            hint="submit a new run for another model, or leave model.* and its code as they were",
        )
    return set(shapes)


def _shape(size: torch.Size | None) -> str:
    return "missing" if size is None else str(list(size))
