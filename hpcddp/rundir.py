"""RunDir: a run's folder, all that the plan half and the nodes share.

    RUN/
      job.json            the checked job, and where it runs                written by submit
      job.sbatch          the script                                        written by submit
      host.pyz            the programs that begin and end an attempt        written by submit
      package.pyz         hpcddp for ranks with a Python of their own       written by submit
      submission.json     the backend and the job id                        written by submit
      request.json        a stop request: stop, cancel, preempt             written by that command
      job-ID.log          output of the script before its claim, and of Slurm
      nodes.jsonl         what attempts met on their nodes                written by the script
      submitit/           files of submitit
      log -> attempts/N/log
      attempts/N/         one attempt
        attempt.json      start, end, host, job id and cause of the end     written by the script
        slurm.json        later facts of Slurm: time limit, site's rules    written by the sentry
        hosts.json        its nodes by rank, if the job has others too      written by the script
        unfit.json        spares that failed their check                    written by the script
        failed.json       when its ranks failed                             written by the script
        met               the process group of a command has started        written on its host
        log               output of all ranks, each line with its rank
        metrics.jsonl     the rank map, then metrics                        written by rank 0
        ranks.jsonl       metrics of each rank                              written by rank 0
        step              the last step and its time                        written by rank 0
        asked.json        its job.json, if a resume replaced it             written by resume
        asked.sbatch      its job.sbatch, if a resume replaced it           written by resume
        trace-R.jsonl     samples and loss of each step (train.trace)       written by rank R
        error.json        the traceback of the rank that failed first       written by that rank
        failures          ranks that failed before the first step           a line of each rank
        staging           the first rank of a command stages data           written by rank 0
        left.json         the ranks of a command saved, to be requeued      written by rank 0
        hang.json         the rank that hangs, and where                    written by one rank
        stacks/           rank-R.txt: threads or state of a rank in a hang  written on its node
        dask/             certificate and address of a Dask cluster         written by rank 0
        sending/          unfinished results; the next attempt removes it
      work/               code snapshot, the working folder of a command  written by submit
      versions.json       Python and packages of a command                by submit, or rank 0
      listings/NAME.tsv   the samples of a dataset                        linked by the first rank
      trackers.json       the run's ids at trackers, and the sent steps   written by the sender
      tensorboard/        event files                                     written by the sender
      wandb/              files of W&B                                    written by wandb
      checkpoints/
        step-N/           complete, with the file COMPLETE                  published by rename
        .step-N.old/      kept until a new step-N has been verified
        .saving-N/        unpublished, of attempt N; the next attempt removes it
      results/            files of submit_result                          published by rename

Each file has one writer, which writes a temporary file and renames it.
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
    """The folder of an attempt: RUN/attempts/N."""

    def __init__(self, path: Path) -> None:
        self.path, self.number = path, int(path.name)
        self.facts, self.slurm = path / "attempt.json", path / "slurm.json"
        self.hosts, self.unfit = path / "hosts.json", path / "unfit.json"
        self.met, self.failures = path / "met", path / "failures"
        self.asked, self.asked_script = path / "asked.json", path / "asked.sbatch"
        self.log = path / "log"
        self.metrics, self.ranks = path / "metrics.jsonl", path / "ranks.jsonl"
        self.error, self.failed = path / "error.json", path / "failed.json"
        self.step, self.staging = path / "step", path / "staging"
        self.left, self.hang = path / "left.json", path / "hang.json"
        self.stacks, self.dask = path / "stacks", path / "dask"
        self.sending = path / "sending"

    def stack(self, rank: int) -> Path:
        """The state of a rank in a hang."""
        return self.stacks / f"rank-{rank}.txt"

    def trace(self, rank: int) -> Path:
        return self.path / f"trace-{rank}.jsonl"

    def traces(self) -> list[Path]:
        """The traces of all ranks."""
        return sorted(self.path.glob("trace-*.jsonl"))


class RunDir:
    """A run folder; only this class names the paths in it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self.name = self.path.name
        self.job = self.path / "job.json"
        self.script = self.path / "job.sbatch"
        self.host = self.path / "host.pyz"
        self.package = self.path / "package.pyz"
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
        self.node_events = self.path / "nodes.jsonl"

    def attempt(self, number: int) -> AttemptDir:
        return AttemptDir(self.attempts / str(number))

    def listing(self, name: str) -> Path:
        """The samples of a dataset, for all ranks and attempts."""
        return self.listings / f"{name}.tsv"

    def job_log(self, job_id: str) -> Path:
        """Output of a job's script before its claim of the run, and of Slurm."""
        return self.path / f"job-{job_id}.log"

    def saving(self, attempt: int) -> Path:
        """Where an attempt writes its checkpoints. It may publish while this folder exists."""
        return self.checkpoints / f".saving-{attempt}"

    def deleted(self) -> bool:
        """Whether the run was removed: its parent folder exists and has other entries.

        Raises:
            OSError: it cannot be read.
        """
        try:
            self.path.stat()
        except FileNotFoundError:
            return any(self.path.parent.iterdir())
        return False

    def outlived(self, attempt: int) -> bool:
        """Whether the attempt is superseded by a newer one."""
        folders = self.all_attempts()
        return bool(folders) and folders[-1].number > attempt

    def all_attempts(self) -> list[AttemptDir]:
        """All attempts, oldest first."""
        with contextlib.suppress(FileNotFoundError):
            numbers = sorted(int(p.name) for p in self.attempts.iterdir() if p.name.isdigit())
            return [self.attempt(n) for n in numbers]
        return []

    def create(self) -> None:
        """Make the folder with mode 0700, or raise RunError."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir(mode=0o700)
            self.attempts.mkdir()
        except OSError as error:
            raise RunError(
                f"cannot make the run folder: {error.strerror}",
                where=str(error.filename or self.path),
                hint="name a writable folder with --runs or HPCDDP_RUNS",
            ) from None


def step_of(folder: Path) -> int | None:
    """The step in a checkpoint's name; None for other folders."""
    match = re.fullmatch(r"step-([0-9]+)|\.step-([0-9]+)\.old", folder.name)
    return int(match[1] or match[2]) if match else None


def step_folders(checkpoints: Path) -> list[Path]:
    """The folders of a run's checkpoints, complete or not.

    Raises:
        OSError: they cannot be read, or the run is missing: the disk may be away.
    """
    try:
        return [path for path in checkpoints.iterdir() if step_of(path) is not None]
    except FileNotFoundError:
        RunDir(checkpoints.parent).attempts.stat()  # each run has it
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
    """A file to write: a temporary file, which is fsynced and renamed at the end. The file is
    complete or missing.

    Only its owner can write to it, whatever the umask: the batch script runs nothing else.

    Args:
        desk: the folder of the temporary file; by default the same folder.
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
    """The object in a JSON file, or None if the file is missing.

    Raises:
        RunUnreadable: it cannot be read now.
        RunError: the file has other contents.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunUnreadable(f"cannot be read: {error}", where=str(path), hint="try again") from None
    except ValueError as error:
        raise RunError(f"is damaged: {error}", where=str(path)) from None
    if not isinstance(data, dict):
        raise RunError("is damaged: not a JSON object", where=str(path))
    return data


def parse_lines(lines: Iterable[str | bytes]) -> Iterator[dict[str, Any]]:
    """The objects of JSON lines; incomplete lines are skipped."""
    for line in lines:
        with contextlib.suppress(ValueError):
            data = json.loads(line)
            if isinstance(data, dict):
                yield data


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON lines file; none if it is missing."""
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
    """The last step of an attempt and its time; zeros without a step."""
    with contextlib.suppress(OSError, struct.error):
        step, when = STEP.unpack(attempt.step.read_bytes())
        return int(step), float(when)
    return 0, 0.0


def runs_in(root: Path, start: str = "", most: int | None = None) -> list[RunDir]:
    """The runs of a folder whose names begin with ``start``, newest first, at most ``most``."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        jobs = [(p / "job.json", p) for p in root.iterdir() if p.name.startswith(start)]
        dated = [(job.stat().st_mtime_ns, p) for job, p in jobs if job.is_file()]
        return [RunDir(p) for _, p in sorted(dated, reverse=True)[:most]]
    return []
