"""Staging before the ranks run a program (command.py): local rank 0 copies, the node's others wait.

The ranks have no process group at that time, so they communicate by files in the staging folder.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hpcddp.attempt.error_record import host
from hpcddp.data.node_cache import claims
from hpcddp.data.stage import LOOK, StagedCopy, folder_of
from hpcddp.errors import HpcddpError, StageError
from hpcddp.rundir import RunDir, read_json, write_json
from hpcddp.topology import Rank

START = 600.0  # seconds for local rank 0 to start staging
SIGN = 1.0  # seconds between two signs of life
SILENT = 30.0  # seconds without a sign of life, where the process is in another PID namespace


def bring(
    run: RunDir,
    job: Mapping[str, Any],
    rank: Rank,
    environ: Mapping[str, str],
    wanted: Callable[[], bool],
) -> Path:
    """Stage the data on this node, and return its folder; also when no longer wanted.

    Args:
        job: content of job.json.
        wanted: whether to continue; called several times a second.

    Raises:
        HpcddpError: staging failed; raised on all ranks of the node.
    """
    try:
        folder = folder_of(run, rank, local=job["backend"] == "local", environ=environ)
        data, attempt = job["spec"]["data"], int(environ.get("HPCDDP_ATTEMPT", "1"))
        turn = f"{attempt}-{environ.get('MASTER_PORT', '')}"
        if rank.local_rank == 0:
            stage = StagedCopy(folder, data["stage"], data["retry_seconds"], turn)
            with _alone(rank, run.attempt(attempt).staging):
                _lead(stage, wanted)
        else:
            _follow(folder, turn, float(environ.get("HPCDDP_START_TIMEOUT", START)), wanted)
    except OSError as error:
        raise StageError(f"cannot stage: {error.strerror}", where=str(error.filename)) from None
    return folder


@contextlib.contextmanager
def _alone(rank: Rank, mark: Path) -> Iterator[None]:
    """Mark that rank 0 does not come to the rendezvous yet (rendezvous.py)."""
    if rank.world_rank == 0:
        mark.touch()
    try:
        yield
    finally:
        if rank.world_rank == 0:
            mark.unlink(missing_ok=True)


def _lead(stage: StagedCopy, wanted: Callable[[], bool]) -> None:
    ended = stage.folder / f".ended-{stage.turn}"
    for old in stage.folder.glob(".ended-*"):
        old.unlink(missing_ok=True)
    signed = time.monotonic()

    def go() -> bool:
        nonlocal signed
        if time.monotonic() - signed >= SIGN:
            signed = time.monotonic()
            with contextlib.suppress(OSError):
                os.utime(stage.owner)
        return wanted()

    try:
        if stage.copy(go):
            write_json(ended, {})
    except HpcddpError as error:
        with contextlib.suppress(OSError):
            write_json(ended, {"error": [error.what, error.where, error.hint]})
        raise


def _follow(folder: Path, turn: str, patience: float, wanted: Callable[[], bool]) -> None:
    owner, ended = folder / ".owner", folder / f".ended-{turn}"
    late = time.monotonic() + patience
    while wanted():
        if (outcome := read_json(ended)) is not None:
            if error := outcome.get("error"):
                what, where, hint = error
                raise StageError(what, where=where, hint=hint)
            return
        if (read_json(owner) or {}).get("turn") == turn:
            if not _alive(owner):
                raise StageError("local rank 0 ended while it staged the data", where=host(),
                                 hint="see its lines in `hpcddp logs`")  # fmt: skip
        elif time.monotonic() > late:
            raise StageError(f"local rank 0 did not start to stage within {patience:g} s",
                             where=host(), hint="see its lines in `hpcddp logs`")  # fmt: skip
        time.sleep(LOOK)


def _alive(owner: Path) -> bool:
    """Whether local rank 0 is alive, or its outcome may not be visible here yet."""
    facts = read_json(owner) or {}
    return (
        claims.lives(str(facts.get("who")), owner, SILENT)
        or time.time() - owner.stat().st_mtime < SILENT
    )
