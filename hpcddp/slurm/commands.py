"""The only caller of squeue, scancel, scontrol, sinfo, and of sbatch outside submitit's submit.

Output is text with fixed fields: Slurm's JSON changes between releases. Every call has a time-out;
a controller that does not answer raises SlurmUnreachable.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from hpcddp.errors import SlurmMissing, SlurmUnreachable
from hpcddp.slurm import other_clusters
from hpcddp.slurm.environment import clean

# Seconds. Slurm's programs wait 10 s for a message, and try again: a busy controller answers late.
TIMEOUT = 30.0

# Variables of a user for Slurm's programs; with them, they would hide jobs from us.
FILTERS = ("SQUEUE_", "SCANCEL_", "SINFO_", "SCONTROL_", "SACCTMGR_")

# States in which a job may still run or be requeued; squeue -t all also shows ended ones.
LIVE = {
    "PENDING", "RUNNING", "SUSPENDED", "CONFIGURING", "COMPLETING", "REQUEUED", "REQUEUE_HOLD",
    "REQUEUE_FED", "RESIZING", "SIGNALING", "SPECIAL_EXIT", "STAGE_OUT", "STOPPED",
}  # fmt: skip

# Messages of Slurm's programs when the controller or munge does not answer.
_AWAY = (
    "Unable to contact", "timed out", "Connection refused", "Unexpected message",
    "Zero Bytes were transmitted", "Rate limit exceeded", "unable to accept job", "not accepting",
    "Invalid authentication credential", "Protocol authentication error", "Munge", "munge",
)  # fmt: skip


class QueuedJob(NamedTuple):
    """A row of squeue."""

    job_id: str
    state: str
    reason: str
    submitted: float | None  # seconds since the epoch
    start: float | None  # of the current attempt, or as expected
    hosts: str
    name: str
    command: str = ""  # the submitted script and its arguments

    @property
    def live(self) -> bool:
        return self.state in LIVE

    def is_in(self, folder: str) -> bool:
        """Whether its command names a run's folder, by any path."""
        real, script = os.path.realpath(folder), self.command.partition("/job.sbatch")[0]
        named = any(f"{name}/" in self.command for name in (folder, real))
        return named or (bool(script) and os.path.realpath(script) == real)

    def is_in_any(self) -> bool:
        """Whether its command names the folder of any run that this host can see."""
        folder, script, _ = self.command.partition("/job.sbatch")
        folders = [folder] if script else []
        folders += [word for word in self.command.split(" ") if word.endswith("/")]
        try:
            return any(Path(name, "job.json").exists() for name in folders)
        except OSError:
            return True


def call(
    *args: str, text: str | None = None, timeout: float = TIMEOUT
) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's programs.

    Raises:
        SlurmUnreachable: it is missing, or its controller does not answer.
    """
    check_sandbox(os.environ)
    try:
        done = subprocess.run(
            args, input=text, capture_output=True, text=True, timeout=timeout, check=False,
            errors="replace",
            stdin=subprocess.DEVNULL if text is None else None, env=_environ(args[0]),
        )  # fmt: skip
    except FileNotFoundError:
        hint = "run this on a login node, with Slurm's programs on PATH"
        raise SlurmMissing(f"{args[0]} not found", hint=hint) from None
    except subprocess.TimeoutExpired:
        raise SlurmUnreachable(
            f"{args[0]} did not answer in {timeout:g} s", hint="try again"
        ) from None
    if done.returncode and away(done.stderr):
        raise SlurmUnreachable(first_line(done.stderr), hint="try again later")
    return done


def check_sandbox(environ: Mapping[str, str]) -> None:
    """Refuse in a shell that uses a sandbox which is down: Slurm's programs would wait for it."""
    conf = environ.get("SLURM_CONF", "")
    if conf and "HPCDDP_SANDBOX" in environ and not Path(conf).exists():
        hint = "run `hpcddp sandbox up`, or `unset SLURM_CONF HPCDDP_SANDBOX`"
        raise SlurmUnreachable("the sandbox of this shell is down", where=conf, hint=hint)


def _environ(program: str) -> dict[str, str]:
    """Its environment, with times in seconds since the epoch, without time zones, and without the
    user's filters, such as SQUEUE_PARTITION; not for sbatch, whose job would inherit that."""
    plain = clean(os.environ)
    if program == "sbatch":
        return plain
    plain = {name: value for name, value in plain.items() if not name.startswith(FILTERS)}
    return {**plain, **other_clusters.variables(), "SLURM_TIME_FORMAT": "%s"}


def first_line(text: str) -> str:
    """The first line that is not empty, without the program's prefix."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return re.sub(r"^\w+: (error|fatal): ", "", lines[0]) if lines else "no message"


def away(words: str) -> bool:
    """Whether a message says that the controller does not answer."""
    return any(sign in words for sign in _AWAY)


def queue(*, name: str = "", timeout: float = TIMEOUT) -> list[QueuedJob]:
    """The user's jobs, all or of one name, newest first; also those that ended minutes ago."""
    fields = "%i|%T|%r|%V|%S|%N|%o|%j"  # a name may contain anything: it comes last
    select = ["--me", "--states=all", "--sort=-i", *([f"--name={name}"] if name else [])]
    done = call("squeue", "--noheader", f"--format={fields}", *select, timeout=timeout)
    if done.returncode:
        raise SlurmUnreachable(f"squeue: {first_line(done.stderr)}", hint="check SLURM_CONF")
    rows = [line.split("|", 7) for line in done.stdout.splitlines() if line.count("|") > 6]
    return [
        QueuedJob(job_id, state, why, moment(submitted), moment(start), hosts, own, command)
        for job_id, state, why, submitted, start, hosts, command, own in rows
    ]


def job(job_id: str, name: str) -> QueuedJob | None:
    """The job with an id and a name, if Slurm still knows it: it uses ids again."""
    return next((row for row in queue(name=name) if row.job_id == job_id), None)


def cancel(job_id: str, *, state: str = "", signal: str = "", timeout: float = TIMEOUT) -> None:
    """Run scancel, or send a signal to every task of the job; only if it is in that state."""
    options = {"--state": state, "--signal": signal}
    words = [f"{name}={value}" for name, value in options.items() if value]
    call("scancel", *words, job_id, timeout=timeout)


class JobInfo(NamedTuple):
    """The controller's facts about a job."""

    state: str
    reason: str = ""
    restarts: int = 0
    preempted: bool = False  # a preemption of this attempt is recorded
    end: float | None = None  # of its time limit, in seconds since the epoch
    exit_code: str = ""  # of the batch script, CODE:SIGNAL
    nodes: str = ""  # its host list; "" while it has none
    resized: bool = False  # Slurm has taken a lost node out of it
    eligible: float | None = None  # when it may start, in seconds since the epoch

    @property
    def running(self) -> bool:
        """Whether it runs: only then can it be requeued."""
        return self.state in ("RUNNING", "SIGNALING")


_FIELDS = ("JobState", "Reason", "Restarts", "PreemptTime", "EndTime", "ExitCode", "NodeList",
           "ResizeTime", "EligibleTime")  # fmt: skip
_SQUEUE = (
    "State:|,Reason:|,RestartCnt:|,PreemptTime:|,EndTime:|,exit_code:|,NodeList:|,ResizeTime:|,"
    "EligibleTime:|"
)


def facts(job_id: str, timeout: float = TIMEOUT) -> JobInfo | None:
    """Slurm's facts about a job; None if it does not know it. Without scontrol, squeue is asked."""
    try:
        done = call("scontrol", "--oneliner", "show", "job", job_id, timeout=timeout)
        fields = dict(re.findall(rf"\b({'|'.join(_FIELDS)})=(\S*)", done.stdout))
    except SlurmMissing:
        ask = ("--noheader", "--states=all", f"--jobs={job_id}", f"--Format={_SQUEUE}")
        done = call("squeue", *ask, timeout=timeout)
        fields = dict(zip(_FIELDS, done.stdout.strip().split("|")))  # noqa: B905
    if not fields.get("JobState"):
        if done.returncode and "nvalid job id" not in done.stderr:
            raise SlurmUnreachable(first_line(done.stderr), hint="try again")
        return None
    return JobInfo(
        fields["JobState"],
        fields.get("Reason", ""),
        int(_digits(fields.get("Restarts", ""))),
        fields.get("PreemptTime", "") not in ("", "None", "N/A"),
        moment(fields.get("EndTime", "")),
        fields.get("ExitCode", ""),
        fields.get("NodeList", "").replace("(null)", ""),
        fields.get("ResizeTime", "") not in ("", "None", "N/A"),
        moment(fields.get("EligibleTime", "")),
    )


def _digits(text: str) -> str:
    return text if text.isdecimal() else "0"


def moment(text: str) -> float | None:
    """A time in seconds since the epoch, from seconds or from a local time, which a Slurm without
    SLURM_TIME_FORMAT writes; None for Unknown."""
    if text.isdecimal():
        return float(text)
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except ValueError:
        return None


def requeue(job_id: str, timeout: float = TIMEOUT) -> str:
    """Requeue a running job of ours; "", or why Slurm refused.

    If a site sets JobRequeue=0, the owner can allow it.

    Raises:
        SlurmUnreachable: it may be requeued or not.
    """
    done = call("scontrol", "requeue", job_id, timeout=timeout)
    if done.returncode and "disabled" in done.stderr:
        call("scontrol", "update", f"JobId={job_id}", "Requeue=1", timeout=timeout)
        done = call("scontrol", "requeue", job_id, timeout=timeout)
    if not done.returncode or "pending execution" in done.stderr:  # requeued already
        return ""
    return first_line(done.stderr)


def takes_updates(job_id: str, timeout: float = TIMEOUT) -> bool:
    """Whether Slurm lets a job be changed. If it keeps no accounts, then never again once the job
    was resized ("the DB index is being set", seen with 22.05).

    Raises:
        SlurmUnreachable: there is no answer.
    """
    return not call(
        "scontrol", "update", f"JobId={job_id}", "Requeue=1", timeout=timeout
    ).returncode


def node_failed(name: str, timeout: float = TIMEOUT) -> bool:
    """Whether Slurm has given a node up, or an administrator has; one that answers late is not.

    Raises:
        SlurmUnreachable: there is no answer.
    """
    done = call("scontrol", "--oneliner", "show", "node", name, timeout=timeout)
    state = re.search(r"\bState=([A-Z_]+)", done.stdout)
    if done.returncode or not state:
        raise SlurmUnreachable(first_line(done.stderr) or f"no state of node {name}")
    return state[1] in ("DOWN", "FAIL")


def release(job_id: str, when: str | None = "now", exclude: str | None = None) -> bool:
    """Set the start time and the excluded nodes, if given, of a waiting job; whether Slurm did."""
    given = {"StartTime": when, "ExcNodeList": exclude}
    words = [f"{name}={value}" for name, value in given.items() if value is not None]
    return not words or not call("scontrol", "update", f"JobId={job_id}", *words).returncode


def takes(script: Path, exclude: str, timeout: float = TIMEOUT) -> bool:
    """Whether `sbatch --test-only` accepts a script that excludes some nodes."""
    options = [f"--exclude={exclude}"] if exclude else []
    return call("sbatch", "--test-only", *options, str(script), timeout=timeout).returncode == 0


def usable_nodes(partition: str = "", timeout: float = TIMEOUT) -> list[str]:
    """Host lists of a partition's nodes that can run jobs now or soon; of all, without a name.

    Raises:
        SlurmUnreachable: there is no answer.
    """
    where = [f"--partition={partition}"] if partition else []
    done = call("sinfo", "--noheader", "--responding", "--format=%N|%T", *where, timeout=timeout)
    if done.returncode:
        raise SlurmUnreachable(f"sinfo: {first_line(done.stderr)}")
    rows = (line.split("|", 1) for line in done.stdout.splitlines() if "|" in line)
    return [hosts for hosts, state in rows if not state.startswith(("down", "drain", "fail"))]
