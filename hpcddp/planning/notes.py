"""Step 3: notes for the user of a right plan. Nothing is refused here."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from hpcddp.data import names
from hpcddp.planning.clusters import Profile
from hpcddp.spec import JobSpec

MARGIN = 30.0  # seconds between the last try to reach a store and a hang


def notes(job: JobSpec, profile: Profile, environ: Mapping[str, str]) -> list[str]:
    """A line for each thing that may go wrong, and cannot be known for certain here."""
    return [*_absent(job), *_patience(job), *_trackers(job), *_output(job, profile, environ)]


def _absent(job: JobSpec) -> list[str]:
    """Staged paths that this machine does not have."""
    absent = names.absent(job.data.stage)
    return [f"data.stage: {path} is not here; the nodes must have it" for path in absent]


def _patience(job: JobSpec) -> list[str]:
    """A store that does not answer would count as a hang before the job gives it up."""
    least, limit = job.data.retry_seconds + MARGIN, job.train.hang_seconds
    if job.command or not 0 < limit < least or "://" not in str(job.dataset):
        return []
    return [
        f"train.hang_seconds is {limit:g}: a store may be away for data.retry_seconds, "
        f"{job.data.retry_seconds:g}, and that would count as a hang: set it to {least:g} or more"
    ]


def _trackers(job: JobSpec) -> list[str]:
    """Trackers whose package this Python lacks; the job's own Python may have it."""
    missing = [name for name in job.metrics.trackers if not importlib.util.find_spec(name)]
    return [
        f"metrics.trackers: the package {name} is not installed here: pip install 'hpcddp[{name}]'"
        for name in missing
    ]


def _output(job: JobSpec, profile: Profile, environ: Mapping[str, str]) -> list[str]:
    """A log file of the user's own for Slurm, and its risk."""
    asked = {f"--{name}": job.slurm[name] for name in ("output", "error") if name in job.slurm}
    variables = ("SBATCH_OUTPUT", "SBATCH_ERROR")
    asked |= {name: environ[name] for name in variables if environ.get(name)}
    if profile.cluster.backend != "slurm":
        return []
    return [
        f"{name} is {path}: where Slurm cannot write there when the job starts, it fails the job; "
        "without it the job waits for its folder, and comes back"
        for name, path in asked.items()
    ]
