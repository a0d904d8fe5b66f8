"""The folders of a job that its container must see, each under its own path."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from hpcddp.errors import UserError
from hpcddp.spec import JobSpec

LOOKS = 10_000  # entries of a folder that are looked at for links
# An image has its own; a path of a command below them means the image's.
SYSTEM = {
    Path(f"/{name}")
    for name in ("bin", "dev", "etc", "lib", "lib64", "proc", "run", "sbin", "sys", "usr", "var")
}


def of(job: JobSpec, runs: Path, folder: Path, shared: Iterable[str]) -> list[str]:
    """What to bind, as SOURCE:TARGET: the runs, the code, the data, what these link to, and the
    job's own binds, which come last.

    Args:
        runs: the folder of the runs.
        folder: the folder of the submission, whose copy the job may work in.
        shared: folders of the node that all ranks on it share.

    Raises:
        UserError: a runtime cannot take the path of one.
    """
    wanted = [runs, folder, *_code(job), *_data(job, folder), *map(Path, shared)]
    whole = {path for each in wanted for path in (each, *_links(each))} - {Path("/")}
    tops = [path for path in sorted(whole) if not whole & set(path.parents)]
    for path in tops:
        if set(str(path)) & {":", ","}:
            raise UserError(
                f"{str(path)!r} contains a colon or a comma, so no container can bind it",
                where="software.container",
                hint="rename the folder, or work in another one",
            )
    own = [bind if ":" in bind else f"{bind}:{bind}" for bind in job.software.container.binds]
    return [*(f"{path}:{path}" for path in tops), *own]


def _code(job: JobSpec) -> Iterator[Path]:
    """The folders of the task, and of the paths in a command."""
    if job.task.startswith("/"):
        yield Path(job.task).parent
    for word in (*job.command, *job.resume_command):
        path = Path(word[word.find("/") :] if word.startswith(("/", "-")) else "")
        if path.is_absolute() and path.exists() and not SYSTEM & {path, *path.parents}:
            yield path if path.is_dir() else path.parent


def _data(job: JobSpec, folder: Path) -> Iterator[Path]:
    """The folders of the data: staged paths, weights, and paths in the arguments of dataset()."""
    values = [value for value in job.dataset.values() if isinstance(value, str)]
    for value in (*job.data.stage, job.start_from, *values):
        path = folder / value
        if value and "://" not in value and path.exists():
            yield path if path.is_dir() else path.parent


def _links(path: Path) -> Iterator[Path]:
    """The real path, and the targets of links in a folder."""
    real = path.resolve()
    if real != path:
        yield real
    for each in islice(path.iterdir(), LOOKS) if path.is_dir() else ():
        target = each.resolve() if each.is_symlink() else real
        if target.exists() and not target.is_relative_to(real):
            yield target
