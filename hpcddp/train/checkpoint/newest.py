"""Chooses the checkpoint to resume from: the newest undamaged one.

A damaged one is skipped for an older one, and kept. If all are damaged, or one cannot be read, the
training fails: starting over at step 0 is left to the user.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hpcddp.errors import CheckpointsDamaged
from hpcddp.rundir import RunDir
from hpcddp.train.checkpoint import checkpoint, damage
from hpcddp.train.checkpoint.disk_retry import DiskRetry, say

T = TypeVar("T")


def find(run: RunDir, retry: DiskRetry) -> Path | None:
    """The newest undamaged checkpoint, the same on all ranks; None if the run has none. A
    collective.

    Raises:
        CheckpointsDamaged: the run has checkpoints, and all are damaged.
        CheckpointUnreadable: a checkpoint cannot be read.
    """
    world = retry.world

    def of_main(look: Callable[[], T], nothing: T) -> T:
        """Rank 0's result, on all ranks."""
        result = retry.read(lambda: _looked(run, look if world.is_main else lambda: nothing))
        return world.gather(result)[0]

    def judged(step: int) -> tuple[Path, str]:
        path, wrong = of_main(lambda: checkpoint.find(run.checkpoints, step), (run.checkpoints, ""))
        return path, wrong or _judged(run, path, retry)

    newest, passed = _choose(of_main(lambda: checkpoint.steps(run.checkpoints), []), judged)
    if world.is_main and newest:
        for name, wrong in passed:
            say(f"{name} is damaged ({wrong}): using an older checkpoint, keeping this one")
    if passed and not newest:
        raise _none_whole(run, passed)
    return newest


def alone(run: RunDir) -> Path | None:
    """``find`` in one process, without retries.

    Raises:
        CheckpointsDamaged: the run has checkpoints, and all are damaged.
        OSError: one cannot be read.
    """

    def judged(step: int) -> tuple[Path, str]:
        path, wrong = checkpoint.find(run.checkpoints, step)
        return path, wrong or damage.of_content(path) or damage.of_format(path)

    newest, passed = _choose(checkpoint.steps(run.checkpoints), judged)
    if passed and not newest:
        raise _none_whole(run, passed)
    return newest


def _choose(
    steps: list[int], judged: Callable[[int], tuple[Path, str]]
) -> tuple[Path | None, list[tuple[str, str]]]:
    """The newest undamaged one, and the damage of newer ones, by name. Older ones are not checked:
    one may be unreadable, which does no harm."""
    passed: list[tuple[str, str]] = []
    for step in steps:
        path, wrong = judged(step)
        if not wrong:
            return path, passed
        passed.append((path.name, wrong))
    return None, passed


def _none_whole(run: RunDir, passed: list[tuple[str, str]]) -> CheckpointsDamaged:
    (name, wrong), *more = passed
    which = f"the newest of {len(passed)}, {name}" if more else name
    return CheckpointsDamaged(
        f"all checkpoints of this run are damaged; {which}: {wrong}",
        where=str(run.checkpoints),
        hint="to train from the beginning, move this folder away and resume the run",
    )


def _looked(run: RunDir, look: Callable[[], T]) -> T:
    """The result of ``look``, if the run folder exists: without its disk, all files would seem to
    be missing.

    Raises:
        OSError: the run folder is missing, or ``look`` failed.
    """
    result = look()
    run.job.stat()
    return result


def _judged(run: RunDir, folder: Path, retry: DiskRetry) -> str:
    """The damage of a checkpoint as the first rank reports it, or ""; a collective."""
    world = retry.world

    def look() -> str:
        wrong = damage.of_content(folder, world.rank.world_rank, world.size)
        return wrong or (damage.of_format(folder) if world.is_main else "")

    reasons = world.gather(retry.read(lambda: _looked(run, look)))
    return next((reason for reason in reasons if reason), "")
