"""The runs of a folder: all of them, and the one that was submitted last."""

from __future__ import annotations

import contextlib
from pathlib import Path

from hpcddp.errors import HpcddpError, RunError
from hpcddp.rundir import RunDir, read_json, runs_in

ELSEWHERE = "name the folder of the runs with --runs or HPCDDP_RUNS"
START = "start a run with `hpcddp submit`, or name another folder with --runs or HPCDDP_RUNS"


def runs_of(root: Path) -> list[RunDir]:
    """The runs of a folder, newest first; none if there is no such folder.

    Raises:
        RunError: it is not a folder, or cannot be read.
    """
    try:
        if root.exists() and not root.is_dir():
            raise RunError("not a folder", where=str(root), hint=ELSEWHERE)
        return runs_in(root)
    except OSError as error:
        what = f"the folder of the runs cannot be read: {error.strerror}"
        raise RunError(what, where=str(root), hint=ELSEWHERE) from None


def last_submitted(runs: list[RunDir]) -> RunDir | None:
    """The run that was submitted last; None if they were only rendered."""
    times = {i: when for i, run in enumerate(runs) if (when := _submitted(run))}
    return runs[max(times, key=lambda i: (times[i], -i))] if times else None


def _submitted(run: RunDir) -> float:
    """When a run was submitted, in seconds since the epoch: by hpcddp, or else when its first
    attempt began; 0 if neither was."""
    with contextlib.suppress(HpcddpError, OSError, TypeError, ValueError):  # it may be damaged
        if submitted := read_json(run.submission):
            return float(submitted.get("submitted") or run.submission.stat().st_mtime)
        if first := run.all_attempts()[:1]:
            return float((read_json(first[0].facts) or {}).get("began", 0.0))
    return 0.0
