"""The runs of a folder: all of them, and the one that was submitted last."""

from __future__ import annotations

from pathlib import Path

from hpcddp.errors import RunError
from hpcddp.rundir import RunDir, runs_in

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
    """The newest run that was submitted, or has begun; a run that was only rendered is none."""
    return next((run for run in runs if run.submission.exists() or run.all_attempts()), None)
