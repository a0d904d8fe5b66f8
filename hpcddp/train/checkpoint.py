"""Step 10: checkpoints that are there wholly or not at all.

    checkpoints/step-N/
      __R_0.distcp     rank R's tensors, written by torch.distributed.checkpoint
      .metadata        which tensor lies where
      meta.json        step, epoch, samples consumed, world, seed, schedule, versions
      COMPLETE         the files' sizes and SHA-256, written last

All of it is written into a hidden folder beside, fsynced, and renamed (publish.py). A folder
without COMPLETE, or whose files have other sizes, is nobody's checkpoint. Here they are found,
judged and read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpcddp.errors import CheckpointError, RunError
from hpcddp.rundir import RunDir, read_json
from hpcddp.train.world import World

FORMAT = 1
COMPLETE = "COMPLETE"
META = "meta.json"
CHUNK = 1 << 20  # bytes hashed at a time
# What every meta.json has, and of which kind.
NUMBERS = ("step", "epoch", "samples_consumed")
OBJECTS = ("optimizer", "scheduler", "scaler")
NAMED = 3  # tensors that an error names


def step_of(folder: Path) -> int | None:
    """The step in a checkpoint's name; None for any other folder."""
    found = re.fullmatch(r"step-([0-9]+)|\.step-([0-9]+)\.old", folder.name)
    return int(found[1] or found[2]) if found else None


def old(folder: Path) -> Path:
    """The name of a checkpoint while another takes its place."""
    return folder.with_name(f".{folder.name}.old")


def complete(checkpoints: Path) -> list[Path]:
    """The complete checkpoints of a run, newest first."""
    with contextlib.suppress(FileNotFoundError):
        steps = {s for p in checkpoints.iterdir() if (s := step_of(p)) is not None}
        found = (_whole(checkpoints / f"step-{s}") for s in sorted(steps, reverse=True))
        return [path for path in found if path]
    return []


def _whole(folder: Path) -> Path | None:
    """Where a checkpoint lies whole. The third look is for one replaced since the first."""
    return next((p for p in (folder, old(folder), folder) if _sizes_match(p)), None)


def torn(checkpoints: Path, newest: Path | None) -> list[str]:
    """The names of incomplete checkpoints that are newer than the newest complete one."""
    with contextlib.suppress(FileNotFoundError):
        least = step_of(newest) if newest else -1
        steps = [(s, p) for p in checkpoints.iterdir() if (s := step_of(p)) is not None]
        return [p.name for s, p in sorted(steps) if s > (least or 0)]
    return []


def _marked(folder: Path) -> dict[str, dict[str, Any]]:
    """The files that COMPLETE names, with size and sha256; none if it is missing or torn."""
    try:
        files = json.loads((folder / COMPLETE).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return files if isinstance(files, dict) else {}


def _sizes_match(folder: Path) -> bool:
    files = _marked(folder)
    try:
        return bool(files) and all(
            Path(name).name == name and (folder / name).stat().st_size == entry["size"]
            for name, entry in files.items()
        )
    except (OSError, KeyError, TypeError):
        return False


def damage(folder: Path, share: int = 0, shares: int = 1) -> str:
    """The first file whose content is not what was written, or "".

    Args:
        share, shares: look at every ``shares``-th file only; ranks divide the reading.
    """
    for name, entry in sorted(_marked(folder).items())[share::shares]:
        try:
            if digest(folder / name)["sha256"] != entry.get("sha256"):
                return name
        except OSError:
            return name
    return ""


def digest(path: Path) -> dict[str, Any]:
    """A file's size in bytes and its SHA-256, as COMPLETE has them."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as f:
        while chunk := f.read(CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return {"size": size, "sha256": digest.hexdigest()}


def newest(run: RunDir, world: World) -> Path | None:
    """The newest undamaged checkpoint, the same on all ranks; None if there is none at all. A
    collective.

    Raises:
        CheckpointError: there are complete ones, and all of them are damaged.
    """
    found: list[Any] = [complete(run.checkpoints)] if world.is_main else [None]
    if world.is_main:
        for name in torn(run.checkpoints, next(iter(found[0]), None)):
            print(f"{name} is incomplete: passed over", flush=True)
    if world.size > 1:
        dist.broadcast_object_list(found, src=0, group=world.control)
    reason = ""
    for folder in found[0]:
        reason = _judged(folder, world)
        if not reason:
            return Path(folder)
        if world.is_main:
            print(f"{folder.name} is damaged ({reason}): passed over", flush=True)
    if reason:
        raise CheckpointError(
            f"no checkpoint of this run is whole; the oldest: {reason}",
            where=str(run.checkpoints),
            hint="to train from the beginning, remove them",
        )
    return None


def _judged(folder: Path, world: World) -> str:
    """What is wrong with a checkpoint, as the first rank that saw it says; a collective."""
    mine = damage(folder, world.rank.world_rank, world.size)
    if not mine and world.is_main:
        mine = unreadable(folder)
    return next((reason for reason in world.gather(mine) if reason), "")


def unreadable(folder: Path) -> str:
    """What is wrong inside of files that are as they were written, or "".

    Nothing that they hold is run. A checkpoint of another format is not damaged: ``read_meta``
    says whose it is.
    """
    from hpcddp.train import shards

    try:
        meta = read_json(folder / META) or {}
        if type(meta.get("format")) is int and meta["format"] != FORMAT:
            return ""
        if not _is_sound(meta) or meta["step"] != step_of(folder):
            return f"{META} is not a checkpoint's"
        shards.read_metadata(folder)
    except RecursionError:
        return f"{META} is not a checkpoint's"
    except (RunError, CheckpointError) as error:
        return error.what
    return ""


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
    """A checkpoint's meta.json; CheckpointError when another format wrote it."""
    meta = read_json(folder / META) or {}
    if meta.get("format") != FORMAT:
        raise CheckpointError(
            f"format {meta.get('format')}, but this version reads format {FORMAT}",
            where=str(folder),
            hint="use the hpcddp that wrote it",
        )
    return meta


def load(folder: Path, tensors: Mapping[str, Tensor], world: World) -> None:
    """Fill the tensors of this rank, whole ones or ``shards.Slice``, in place; a collective."""
    from hpcddp.train import shards

    shards.read(folder, tensors, world.control, alone=False)


def check_names(folder: Path, sizes: Mapping[str, torch.Size]) -> set[str]:
    """All names in a checkpoint; CheckpointError when its model is not this one.

    Args:
        sizes: of all the model's tensors, by name.
    """
    from hpcddp.train import shards

    there = shards.shapes(folder)
    theirs = {n: shape for n, (shape, _) in there.items() if n.startswith("model.")}
    differ = [n for n in sorted(sizes.keys() | theirs.keys()) if sizes.get(n) != theirs.get(n)]
    if differ:
        said = [
            f"{n} is {_shape(theirs.get(n))} there and {_shape(sizes.get(n))} here"
            for n in differ[:NAMED]
        ]
        more = f"; and {len(differ) - NAMED} more" if len(differ) > NAMED else ""
        raise CheckpointError(
            f"it is of another model: {'; '.join(said)}{more}",
            where=str(folder),
            hint="submit a new run for another model",
        )
    return set(there)


def _shape(size: torch.Size | None) -> str:
    return "missing" if size is None else str(list(size))
