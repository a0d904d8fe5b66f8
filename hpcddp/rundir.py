"""RunDir: one job's folder, the only thing that crosses between the plan half and the nodes.

    RUN/
      job.json            what was asked, checked, and where it runs        written by submit
      job.sbatch          the script                                        written by submit
      host.pyz            what the script asks on its host                  written by submit
      submission.json     who took the script, under which id               written by submit
      request.json        a person's wish: stop, cancel, preempt            written by that command
      job-ID.log          the script before its claim, and Slurm's own words
      submitit/           submitit's own files
      log -> attempts/N/log
      attempts/N/         one life of the job between start and stop
        attempt.json      when, where, as which job; how it ended           written by the script
        slurm.json        what Slurm said later: time limit, site's rules   written by the sentry
        met               a program's ranks have met                        written on its host
        log               output of all ranks, each line with its rank
        metrics.jsonl     the rank map, then metrics                        written by rank 0
        ranks.jsonl       each rank's own figures, line by line             written by rank 0
        step              the last step, and when                           written by rank 0
        asked.json        job.json and job.sbatch as they were then, which  written by resume
        asked.sbatch      a resume has replaced
        trace-R.jsonl     each step's samples and loss, if asked for        written by rank R
        error.json        the first failing rank's traceback                written by that rank
        failures          which ranks failed before any step, and of what   a line of each rank
        staging           a program's first rank stages data still            written by rank 0
        left.json         a program's ranks saved and left, to come back    written by rank 0
        hang.json         which rank hangs, and where                       written by the first
        stacks/           rank-R.txt: its threads or its state in a hang    written by it, or beside
        dask/             a cluster's certificate and address, while it is  written by rank 0
        sending/          results on their way; the next attempt takes it away
      work/               a command's working folder: the code as it was  written by submit
      versions.json       its Python and packages                         by submit, or rank 0
      listings/NAME.tsv   which samples a dataset has                     linked by the first rank
      trackers.json       the run at its trackers, and what they know     written by who tells them
      tensorboard/        event files                                     written by who tells it
      wandb/              W&B's own files                                 written by wandb
      checkpoints/
        step-N/           complete, with COMPLETE in it                     published by rename
        .step-N.old/      until another step-N in its place is read back
        .saving-N/        of attempt N, not yet published; the next attempt takes it away
      results/            what a person's code has sent                   published by rename

Every file has one writer, and is written aside and renamed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from hpcddp.errors import RunError, RunUnreadable


class AttemptDir:
    """One attempt's folder: RUN/attempts/N."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.number = int(path.name)
        self.facts = path / "attempt.json"
        self.slurm = path / "slurm.json"
        self.met = path / "met"
        self.failures = path / "failures"
        self.asked = path / "asked.json"
        self.asked_script = path / "asked.sbatch"
        self.log = path / "log"
        self.metrics = path / "metrics.jsonl"
        self.ranks = path / "ranks.jsonl"
        self.error = path / "error.json"
        self.step = path / "step"
        self.staging = path / "staging"
        self.left = path / "left.json"
        self.hang = path / "hang.json"
        self.stacks = path / "stacks"
        self.dask = path / "dask"
        self.sending = path / "sending"

    def stack(self, rank: int) -> Path:
        """What rank was doing in a hang."""
        return self.stacks / f"rank-{rank}.txt"

    def trace(self, rank: int) -> Path:
        return self.path / f"trace-{rank}.jsonl"


class RunDir:
    """One run's folder; every path in it is named here and nowhere else."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self.name = self.path.name
        self.job = self.path / "job.json"
        self.script = self.path / "job.sbatch"
        self.host = self.path / "host.pyz"
        self.submission = self.path / "submission.json"
        self.request = self.path / "request.json"
        self.log = self.path / "log"
        self.submitit = self.path / "submitit"
        self.attempts = self.path / "attempts"
        self.checkpoints = self.path / "checkpoints"
        self.work = self.path / "work"
        self.versions = self.path / "versions.json"
        self.listings = self.path / "listings"
        self.results = self.path / "results"
        self.trackers = self.path / "trackers.json"
        self.tensorboard = self.path / "tensorboard"

    def attempt(self, number: int) -> AttemptDir:
        return AttemptDir(self.attempts / str(number))

    def listing(self, name: str) -> Path:
        """Which samples a dataset has, for all ranks and attempts."""
        return self.listings / f"{name}.tsv"

    def job_log(self, job_id: str) -> Path:
        """What a job's script said before it claimed the run, and what Slurm says of the job."""
        return self.path / f"job-{job_id}.log"

    def saving(self, attempt: int) -> Path:
        """Where an attempt writes its checkpoints. While this folder is there, it may publish."""
        return self.checkpoints / f".saving-{attempt}"

    def deleted(self) -> bool:
        """Whether somebody has removed the run: other entries of its parent folder are there.

        Raises:
            OSError: that cannot be read.
        """
        try:
            self.path.stat()
        except FileNotFoundError:
            return any(self.path.parent.iterdir())
        return False

    def outlived(self, attempt: int) -> bool:
        """Whether a newer attempt has begun: it owns the run dir."""
        folders = self.all_attempts()
        return bool(folders) and folders[-1].number > attempt

    def all_attempts(self) -> list[AttemptDir]:
        """The attempts so far, oldest first."""
        with contextlib.suppress(FileNotFoundError):
            numbers = sorted(int(p.name) for p in self.attempts.iterdir() if p.name.isdigit())
            return [self.attempt(n) for n in numbers]
        return []

    def create(self) -> None:
        """Make the folder with mode 0700; RunError if it cannot be made."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir(mode=0o700)
            self.attempts.mkdir()
        except OSError as error:
            raise RunError(
                f"the run's folder cannot be made: {error.strerror}",
                where=str(error.filename or self.path),
                hint="name a folder that you can write with --runs or HPCDDP_RUNS",
            ) from None


def step_of(folder: Path) -> int | None:
    """The step in a checkpoint's name; None for any other folder."""
    match = re.fullmatch(r"step-([0-9]+)|\.step-([0-9]+)\.old", folder.name)
    return int(match[1] or match[2]) if match else None


def step_folders(checkpoints: Path) -> list[Path]:
    """The folders of a run's checkpoints, whole or not.

    Raises:
        OSError: that cannot be read, or the run is not there: the disk may be away.
    """
    try:
        return [path for path in checkpoints.iterdir() if step_of(path) is not None]
    except FileNotFoundError:
        RunDir(checkpoints.parent).attempts.stat()  # every run has it
        return []


def token(size: int) -> str:
    """Random bytes as hexadecimal digits."""
    return os.urandom(size).hex()


def new_id(name: str) -> str:
    """A run's id: NAME-YYYYMMDD-HHMM-XXXX, in local time."""
    return f"{name}-{time.strftime('%Y%m%d-%H%M')}-{token(2)}"


def write_text(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a text file as `write_bytes` does."""
    write_bytes(path, text.encode(), mode)


def write_bytes(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write a file as `written` does."""
    with written(path, mode) as f:
        f.write(data)


@contextlib.contextmanager
def written(path: Path, mode: int = 0o644, desk: Path | None = None) -> Iterator[IO[bytes]]:
    """A file to write: it is written aside, fsynced, and renamed into place at the end; it is there
    wholly or not at all.

    Only its owner can write to it, whatever the umask: the batch script runs nothing else.

    Args:
        desk: the folder where it is written, else that of its place.
    """
    aside = (desk or path.parent) / f".{path.name}.{os.getpid()}.{token(3)}"
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with open(fd, "wb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def write_json(path: Path, data: Any) -> None:
    """Write plain data as JSON, atomically."""
    write_text(path, json.dumps(data, indent=1, sort_keys=True) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file, or None if the file is not there.

    Raises:
        RunUnreadable: it cannot be read now.
        RunError: the file holds something else.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunUnreadable(f"cannot be read: {error}", where=str(path)) from None
    except ValueError as error:
        raise RunError(f"cannot be read: {error}", where=str(path)) from None
    if not isinstance(data, dict):
        raise RunError("holds no JSON object", where=str(path))
    return data


def parse_lines(lines: Iterable[str | bytes]) -> Iterator[dict[str, Any]]:
    """The objects of JSON lines; a line cut by a crash is passed over."""
    for line in lines:
        with contextlib.suppress(ValueError):
            data = json.loads(line)
            if isinstance(data, dict):
                yield data


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON lines file, from its beginning; none if it is not there."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as f:
        yield from parse_lines(f)


def last_lines(path: Path, size: int) -> list[dict[str, Any]]:
    """The objects in the last `size` bytes of a JSON lines file."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as f:
        f.seek(max(0, f.seek(0, os.SEEK_END) - size))
        return list(parse_lines(f))
    return []


STEP = struct.Struct("<qd")  # step, seconds since the epoch


def read_step(attempt: AttemptDir) -> tuple[int, float]:
    """The last step that an attempt took, and when; zeros if it took none."""
    with contextlib.suppress(OSError, struct.error):
        step, when = STEP.unpack(attempt.step.read_bytes())
        return int(step), float(when)
    return 0, 0.0


def runs_in(root: Path, start: str = "", most: int | None = None) -> list[RunDir]:
    """The runs of a folder whose names begin so, newest first; ``most`` of them at most."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        jobs = [(p / "job.json", p) for p in root.iterdir() if p.name.startswith(start)]
        dated = [(job.stat().st_mtime_ns, p) for job, p in jobs if job.is_file()]
        return [RunDir(p) for _, p in sorted(dated, reverse=True)[:most]]
    return []
