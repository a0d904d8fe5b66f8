"""sbatch: whether it is installed, its verdict on a script, and the error of its refusal."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

from hpcddp.errors import SlurmUnreachable, SubmissionRefused
from hpcddp.slurm import commands as slurm

# A line that says why sbatch refuses a script; getopt's are those of an option that this release
# does not have.
SAYS = re.compile(r"sbatch: (?:(?:error|fatal): |(?=(?:unrecognized|invalid|ambiguous) option\b)"
                  r"|(?=option '))")  # fmt: skip

TIME = re.compile(r"\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\b")


def answers() -> bool:
    """Whether sbatch is installed and configured; its controller may be unreachable.

    Raises:
        SlurmUnreachable: the sandbox of this shell is down.
    """
    slurm.check_sandbox(os.environ)
    if not shutil.which("sbatch"):
        return False
    try:
        return slurm.call("sbatch", "--version").returncode == 0
    except SlurmUnreachable:
        return False


def verdict(script: str) -> tuple[bool, str]:
    """The verdict of `sbatch --test-only` on a script: accepted or not, and its message.

    A site's job_submit plugin may print lines of its own before it: the start time of an accepted
    job is the message, or else all that sbatch says.
    """
    done = slurm.call("sbatch", "--test-only", text=script)
    lines = [re.sub(r"^sbatch: (?:(?:error|fatal): )?", "", line.strip())
             for line in done.stderr.splitlines() if line.strip()]  # fmt: skip
    start = [TIME.sub(_zoned, line) for line in lines if re.match(r"Job \S+ to start", line)]
    return done.returncode == 0, "; ".join(start or lines) or "no message"


def _zoned(match: re.Match[str]) -> str:
    """A time of Slurm's with the zone of this machine, which Slurm leaves out."""
    moment = time.mktime(time.strptime(match[0], "%Y-%m-%dT%H:%M:%S"))
    return match[0] + time.strftime(" %Z", time.localtime(moment))


def refusal(words: str, script: Path) -> SubmissionRefused | None:
    """The error of a script that sbatch refused; None if its message is no refusal: then the job
    may exist all the same."""
    lines = [SAYS.sub("", line.strip()) for line in words.splitlines() if SAYS.search(line)]
    if not lines or slurm.away(words):
        return None
    return SubmissionRefused(
        f"sbatch refused the job: {'; '.join(lines)}",
        where=str(script),
        hint="fix the option or the job file, and submit again",
    )


def error_line(words: str) -> str:
    """sbatch's first error line; "" without one."""
    return next((line for line in words.splitlines() if SAYS.search(line)), "")
