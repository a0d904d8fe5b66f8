"""Step 3: notes for the user on a valid plan. Nothing is refused here."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from hpcddp.data import names
from hpcddp.errors import install_extra
from hpcddp.launch import script
from hpcddp.launch.launchers import LAUNCHERS
from hpcddp.planning.clusters import Profile
from hpcddp.planning.software import software_checks
from hpcddp.spec import KEYS, JobSpec

OF_TASK = (
    "global_batch", "epochs", "max_steps", "train.lr", "train.weight_decay", "train.schedule",
    "train.warmup_steps", "train.clip_norm", "train.micro_batch", "train.find_micro_batch",
    "train.precision", "train.recompute", "train.compile", "train.eval_every",
)  # fmt: skip
MARGIN = 30.0  # seconds between the last retry of a store and a hang


def notes(
    job: JobSpec, profile: Profile, environ: Mapping[str, str], ranks: int = 1,
    runs: Path | None = None,
) -> list[str]:  # fmt: skip
    """A line for each possible problem that cannot be checked on this machine, and for what another
    launcher would save.

    Args:
        ranks: of a node.
        runs: the folder of the runs, for a new run.
    """
    return [
        *_unused(job),
        *_absent(job),
        *software_checks.notes(job),
        *_patience(job),
        *_trackers(job),
        *_output(job, profile, environ),
        *(_faster_start(job, ranks, runs) if runs else ()),
    ]


def _faster_start(job: JobSpec, ranks: int, runs: Path) -> list[str]:
    """What the launcher of tasks would save a script that can use it; at the first run of a job."""
    words = list(filter(None, (job.command, job.resume_command)))
    if not words or job.launcher or not all(map(script.in_process, words)):
        return []
    other = next(row.name for row in LAUNCHERS.values() if row.tasks)
    if job.spares:
        return [
            f"--spares starts the ranks by the launcher {other}, which imports torch before the "
            "script runs: variables that torch reads at its import go into [env]"
        ]
    if ranks < 2 or job.own_programs or any(runs.glob(f"{job.name}-*")):
        return []
    return [
        f"--launcher {other} imports torch once per node, and not in each of its {ranks} ranks: "
        f"the run starts sooner, unless the script sets variables before it imports torch"
    ]


def _unused(job: JobSpec) -> list[str]:
    """Keys that only the training loop of a task reads."""
    if not job.command:
        return []
    values = KEYS.flatten(asdict(job))
    unused = [name for name in OF_TASK if values[name] != KEYS.rows[name].default]
    return [f"{name} has no effect on a command: set it in the script" for name in unused]


def _absent(job: JobSpec) -> list[str]:
    """Staged paths that do not exist on this machine."""
    absent = names.absent(job.data.stage)
    return [
        f"data.stage: {path} does not exist on this machine, but must exist on the nodes"
        for path in absent
    ]


def _patience(job: JobSpec) -> list[str]:
    """A store that does not answer would count as a hang while the job still retries."""
    least, limit = job.data.retry_seconds + MARGIN, job.train.hang_seconds
    if job.command or not 0 < limit < least or "://" not in str(job.dataset):
        return []
    return [
        f"train.hang_seconds ({limit:g} s) is too short for data.retry_seconds "
        f"({job.data.retry_seconds:g} s): a store that does not answer would count as a hang; "
        f"set train.hang_seconds to {least:g} or more"
    ]


def _trackers(job: JobSpec) -> list[str]:
    """Trackers whose package is not in this Python; the job's Python may have it."""
    missing = [name for name in job.metrics.trackers if not importlib.util.find_spec(name)]
    return [
        f"metrics.trackers: package {name} is not installed in this Python; {install_extra(name)}"
        for name in missing
    ]


def _output(job: JobSpec, profile: Profile, environ: Mapping[str, str]) -> list[str]:
    """The risk of the user's own log file for Slurm."""
    asked = {f"--{name}": job.slurm[name] for name in ("output", "error") if name in job.slurm}
    variables = ("SBATCH_OUTPUT", "SBATCH_ERROR")
    asked |= {name: environ[name] for name in variables if environ.get(name)}
    if profile.cluster.backend != "slurm":
        return []
    return [
        f"{name} is {path}: if Slurm cannot write there when the job starts, the job fails; "
        f"without {name} it waits for its run folder and is requeued"
        for name, path in asked.items()
    ]
