"""Step 10: checkpoints that are there wholly or not at all.

    checkpoints/step-N/
      __R_0.distcp     rank R's tensors, written by torch.distributed.checkpoint
      .metadata        which tensor lies where
      meta.json        step, epoch, samples consumed, world, seed, schedule, versions
      COMPLETE         the files' sizes and SHA-256, written last

All of it is written into a hidden folder beside, fsynced, and renamed. A folder without COMPLETE,
or whose files have other sizes, is nobody's checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpcddp.errors import CheckpointError, UserError
from hpcddp.rundir import RunDir, read_json, write_json
from hpcddp.train.world import World

FORMAT = 1
COMPLETE = "COMPLETE"
META = "meta.json"
CHUNK = 1 << 20  # bytes hashed at a time


def step_of(folder: Path) -> int | None:
    """The step in a checkpoint's name; None for any other folder."""
    prefix, dash, number = folder.name.partition("-")
    return int(number) if prefix == "step" and dash and number.isdecimal() else None


def complete(checkpoints: Path) -> list[Path]:
    """The complete checkpoints of a run, newest first."""
    with contextlib.suppress(FileNotFoundError):
        steps = [(s, p) for p in checkpoints.iterdir() if (s := step_of(p)) is not None]
        return [p for _, p in sorted(steps, reverse=True) if _sizes_match(p)]
    return []


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
    except (OSError, ValueError, KeyError, TypeError):
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
    """The newest undamaged checkpoint, the same on all ranks; a collective."""
    found: list[Any] = [complete(run.checkpoints)] if world.is_main else [None]
    if world.is_main:
        for name in torn(run.checkpoints, next(iter(found[0]), None)):
            print(f"{name} is incomplete: passed over", flush=True)
    if world.size > 1:
        dist.broadcast_object_list(found, src=0, group=world.control)
    for folder in found[0]:
        bad = damage(folder, world.rank.world_rank, world.size)
        verdict = torch.tensor([int(bool(bad))])
        if world.size > 1:
            dist.all_reduce(verdict, dist.ReduceOp.MAX, group=world.control)
        if not verdict.item():
            return Path(folder)
        if bad:
            print(f"{folder.name} is damaged ({bad}): passed over", flush=True)
    return None


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


def save(
    run: RunDir, attempt: int, world: World, tensors: Mapping[str, Tensor], meta: dict[str, Any]
) -> tuple[Path, int]:
    """Write checkpoints/step-N of all ranks; a collective.

    Args:
        tensors: by name; a name that several ranks have is written once.
        meta: plain data with "step"; rank 0's counts.

    Returns: its folder, and its size in bytes (on rank 0; 0 elsewhere).
    """
    from hpcddp.train import shards

    step = meta["step"]
    aside = run.checkpoints / f".step-{step}.{attempt}"
    if world.is_main:
        _clear(run.checkpoints)
    world.barrier()
    shards.write(aside, tensors, world.control)
    rank = world.rank.world_rank
    files = {p.name: digest(p) for p in aside.glob(f"__{rank}_*")}
    gathered: list[Any] = [None] * world.size if world.is_main else []
    if world.size > 1:
        dist.gather_object(files, gathered if world.is_main else None, group=world.control)
    else:
        gathered = [files]
    target, size = run.checkpoints / f"step-{step}", 0
    if world.is_main:
        size = _publish(aside, target, {k: v for part in gathered for k, v in part.items()}, meta)
    world.barrier()
    return target, size


def _clear(checkpoints: Path) -> None:
    """Remove what earlier attempts left unfinished."""
    checkpoints.mkdir(exist_ok=True)
    for path in checkpoints.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)


def _publish(
    aside: Path, target: Path, files: dict[str, dict[str, Any]], meta: dict[str, Any]
) -> int:
    """Rank 0: mark the folder complete and rename it into place. Returns its size in bytes."""
    from hpcddp.train import shards

    write_json(aside / META, {"format": FORMAT, **meta})
    for name in (META, shards.METADATA):
        files[name] = digest(aside / name)
    write_json(aside / COMPLETE, {"format": FORMAT, "files": files})
    _fsync(aside)
    if target.exists():  # damaged, or this step was taken again from an older one
        target.rename(target.with_name(f".{target.name}.old"))
    aside.rename(target)
    _fsync(target.parent)
    shutil.rmtree(target.with_name(f".{target.name}.old"), ignore_errors=True)
    return sum(entry["size"] for entry in files.values())


def _fsync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def load(folder: Path, tensors: Mapping[str, Tensor], world: World) -> None:
    """Fill the tensors of this rank in place; a collective."""
    from hpcddp.train import shards

    shards.read(folder, tensors, world.control, alone=False)


def check_names(folder: Path, tensors: Mapping[str, Tensor]) -> set[str]:
    """All names in a checkpoint; CheckpointError when its model is not this one."""
    from hpcddp.train import shards

    there = shards.shapes(folder)
    ours = {n: t.shape for n, t in tensors.items() if n.startswith("model.")}
    theirs = {n: shape for n, (shape, _) in there.items() if n.startswith("model.")}
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            here, saved = (_shape(d.get(name)) for d in (ours, theirs))
            raise CheckpointError(
                f"it is of another model: {name} is {saved} there and {here} here",
                where=str(folder),
                hint="submit a new run for another model",
            )
    return set(there)


def _shape(size: torch.Size | None) -> str:
    return "missing" if size is None else str(list(size))


def prune(checkpoints: Path, keep: int, best: int | None) -> None:
    """Remove all but the newest ``keep`` checkpoints and the best; rank 0 only."""
    for folder in complete(checkpoints)[keep:]:
        if step_of(folder) != best:
            # Renamed first: what is removed half is no checkpoint at any instant.
            gone = folder.with_name(f".{folder.name}.old")
            folder.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)


def export(run: RunDir, target: Path) -> int:
    """Write {parameter name: tensor} of the newest complete checkpoint, without a process group.

    ``model.load_state_dict(torch.load(target, weights_only=True))`` reads it.

    Returns: the checkpoint's step.

    Raises:
        CheckpointError: there is no complete, undamaged checkpoint.
        UserError: the target cannot be written.
    """
    from hpcddp.train import shards

    for folder in complete(run.checkpoints):
        if damage(folder):
            continue
        tensors = shards.read_all(folder, "model.")
        _write_plain({name.removeprefix("model."): t for name, t in tensors.items()}, target)
        return step_of(folder) or 0
    raise CheckpointError(
        "there is no complete checkpoint",
        where=str(run.checkpoints),
        hint="the first one is saved after checkpoint.every steps, or at the end",
    )


def _write_plain(tensors: dict[str, Tensor], target: Path) -> None:
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        torch.save(tensors, aside)
        aside.replace(target)
    except (OSError, RuntimeError) as error:  # torch says a missing folder with RuntimeError
        aside.unlink(missing_ok=True)
        raise UserError(f"cannot be written: {error}", where=str(target)) from None
