"""The jobs that follow a job: they continue its run in the same folder."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from hpcddp.errors import SlurmUnreachable, SubmissionRefused
from hpcddp.slurm.commands import TIMEOUT, call, first_line, queue

# When a follow-up may start. If its parent's script is alive and will leave with 0, it is cancelled
# with its parent. If Slurm ends the parent, or will call it PREEMPTED, the follow-up checks the
# cause when it starts.
DEPENDENCIES = {
    True: ("--dependency=afterok:{}", "--kill-on-invalid-dep=yes"),
    False: ("--dependency=afterany:{}",),
}


def successor(
    script: Path, arguments: Sequence[str], parent: str, *, ok: bool, exclude: str = "",
    timeout: float = TIMEOUT,
) -> str:  # fmt: skip
    """Submit a script as the follow-up of a job; the new job's id.

    Args:
        arguments: the script's: the attempt to follow. It leaves at once if the run has continued
            without it.
        ok: its parent's script leaves with 0; see DEPENDENCIES.

    Raises:
        SlurmUnreachable: there may be a follow-up; ``follow_ups`` finds it later.
        SubmissionRefused: there is none.
    """
    options = [option.format(parent) for option in DEPENDENCIES[ok]]
    options += [f"--exclude={exclude}"] if exclude else []
    options += ["--begin=now"]  # not the begin of the first job
    done = call("sbatch", "--parsable", *options, str(script), *arguments, timeout=timeout)
    if done.returncode:
        raise SubmissionRefused(first_line(done.stderr), where=str(script))
    job_id = done.stdout.strip().partition(";")[0]
    with contextlib.suppress(OSError, SlurmUnreachable):  # the user has released the first job
        if "\n#SBATCH --hold" in script.read_text(encoding="utf-8"):
            call("scontrol", "release", job_id, timeout=timeout)
    return job_id


def follow_ups(script: Path, name: str, timeout: float = TIMEOUT) -> dict[str, int]:
    """The jobs, waiting or running, that were submitted to follow an attempt: id -> attempt."""
    rows = [row for row in queue(name=name, timeout=timeout) if row.live]
    words = {row.job_id: row.command.removeprefix(f"{script} ").split(" ") for row in rows
             if row.command.startswith(f"{script} ")}  # fmt: skip
    return {job_id: int(args[0]) for job_id, args in words.items() if args[0].isdecimal()}


def wait_for_any_end(job_id: str, parent: str, timeout: float = TIMEOUT) -> bool:
    """Let a follow-up start after any end of its parent, whose script cannot leave with 0. False if
    Slurm refuses that: an end of the parent would drop it.

    Raises:
        SlurmUnreachable: there was no answer.
    """
    (option,) = DEPENDENCIES[False]
    words = f"JobId={job_id}", option.format(parent).removeprefix("--")
    return call("scontrol", "update", *words, timeout=timeout).returncode == 0


def end_for_good(job_id: str, timeout: float = TIMEOUT) -> None:
    """Let a job of ours end when its script does.

    Slurm 24.11 and later requeue a preempted job at the end of its script. The follow-up would wait
    for the requeued job, and it does so if Slurm does not answer here.
    """
    with contextlib.suppress(SlurmUnreachable):
        call("scontrol", "update", f"JobId={job_id}", "Requeue=0", timeout=timeout)
