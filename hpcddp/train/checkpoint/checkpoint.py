"""Step 10: checkpoints that are there wholly or not at all.

    checkpoints/step-N/
      __R_0.distcp     rank R's tensors, written by torch.distributed.checkpoint
      .metadata        which tensor lies where
      meta.json        step, epoch, samples consumed, world, seed, schedule, versions
      COMPLETE         the files' sizes and SHA-256, written last

All of it is written into a hidden folder beside, fsynced, and renamed (publish.py). A folder
without COMPLETE, or whose files have other sizes, is damaged: no training goes on from it, and
none removes it. One that cannot be read is not damaged: an OSError says so (disk_retry.py). Here
they are judged and read; newest.py chooses one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hpcddp.errors import CheckpointError, CheckpointForeign
from hpcddp.rundir import step_folders
from hpcddp.rundir import step_of as step_of
from hpcddp.train.checkpoint.disk_retry import DiskRetry, naming

if TYPE_CHECKING:
    from hpcddp.train.checkpoint import dcp_files

FORMAT = 1
COMPLETE = "COMPLETE"
META = "meta.json"
CHUNK = 1 << 20  # bytes hashed at a time
# What every meta.json has, and of which kind.
NUMBERS = ("step", "epoch", "samples_consumed")
OBJECTS = ("optimizer", "scheduler", "scaler")
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
    """The folder of a step's checkpoint, and its damage as ``judge`` sees it.

    Raises:
        OSError: that cannot be read.
    """
    folder, wrong = checkpoints / f"step-{step}", ""
    for path in (folder, old(folder), folder):  # once more: it may be replaced since the first look
        reason = judge(path)
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


def judge(folder: Path) -> str:
    """The damage of a checkpoint by COMPLETE and the sizes of its files; "" if it is whole.

    Raises:
        OSError: that cannot be read, which is no damage.
    """
    try:
        files = _marked(folder)
    except (FileNotFoundError, NotADirectoryError):
        return f"{COMPLETE} is missing"
    if not files:
        return f"{COMPLETE} is damaged"
    for name, entry in files.items():
        try:
            size = (folder / name).stat().st_size
        except FileNotFoundError:
            return f"{name} is missing"
        if size != entry.get("size"):
            return f"{name} has {size} of {entry.get('size')} bytes"
    return ""


def _marked(folder: Path) -> dict[str, dict[str, Any]]:
    """The files that COMPLETE names, with size and sha256; none if it is torn.

    Raises:
        OSError: it is missing, or cannot be read.
    """
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
        files: dict[str, dict[str, Any]] = json.loads(_text(folder / COMPLETE))["files"]
        if all(_is_entry(name, entry) for name, entry in files.items()):
            return files
    return {}


def _is_entry(name: str, entry: object) -> bool:
    return Path(name).name == name and "\0" not in name and isinstance(entry, dict)


def _text(path: Path) -> str:
    with naming(path):
        return path.read_text(encoding="utf-8")


def damage(folder: Path, share: int = 0, shares: int = 1) -> str:
    """The first file whose content is not what was written, or "".

    Args:
        share, shares: look at every ``shares``-th file only; ranks divide the reading.

    Raises:
        OSError: one cannot be read, which is no damage.
    """
    try:
        for name, entry in sorted(_marked(folder).items())[share::shares]:
            if digest(folder / name)["sha256"] != entry.get("sha256"):
                return f"{name} is not what was written"
    except FileNotFoundError as error:
        return _missing(error)
    return ""


def _missing(error: FileNotFoundError) -> str:
    return f"{Path(error.filename).name} is missing"


def digest(path: Path) -> dict[str, Any]:
    """A file's size in bytes and its SHA-256, as COMPLETE has them."""
    digest, size = hashlib.sha256(), 0
    with naming(path), path.open("rb") as f:
        while chunk := f.read(CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return {"size": size, "sha256": digest.hexdigest()}


def unreadable(folder: Path) -> str:
    """The damage inside of files that have their sizes and checksums, or "".

    Nothing that they hold is run. A checkpoint of another format is not damaged: ``read_meta``
    says whose it is.

    Raises:
        OSError: one cannot be read, which is no damage.
    """
    from hpcddp.train.checkpoint import dcp_files

    try:
        meta = _meta(folder)
        if type(meta.get("format")) is int and meta["format"] != FORMAT:
            return ""
        if not _is_sound(meta) or meta["step"] != step_of(folder):
            return f"{META} is not a checkpoint's"
        dcp_files.read_metadata(folder)
    except FileNotFoundError as error:
        return _missing(error)
    except CheckpointError as error:
        return error.what
    return ""


def _meta(folder: Path) -> dict[str, Any]:
    """The content of meta.json; empty if it is no JSON object."""
    with contextlib.suppress(ValueError, RecursionError):
        meta = json.loads(_text(folder / META))
        return meta if isinstance(meta, dict) else {}
    return {}


def _is_sound(meta: dict[str, Any]) -> bool:
    optimizer = meta.get("optimizer")
    return (
        meta.get("format") == FORMAT
        and all(type(meta.get(name)) is int and meta[name] >= 0 for name in NUMBERS)
        and all(isinstance(meta.get(name), dict) for name in OBJECTS)
        and isinstance(meta.get("best", {}), dict)
        and isinstance(optimizer, dict)
        and isinstance(optimizer.get("state"), dict)
        and isinstance(optimizer.get("param_groups"), list)
    )


def read_meta(folder: Path) -> dict[str, Any]:
    """A checkpoint's meta.json.

    Raises:
        CheckpointForeign: another format wrote it.
        OSError: it cannot be read.
    """
    meta = _meta(folder)
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
