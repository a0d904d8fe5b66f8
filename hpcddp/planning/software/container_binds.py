"""The folders of a job that its container must see, each under its own path."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterable, Iterator
from functools import lru_cache
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
    wanted = [runs, folder, *_code(job), *data_folders(job, folder)]
    linked = _links(tuple(path for path in wanted if path != Path("/")))
    whole = {*wanted, *linked, *map(Path, shared)} - {Path("/")}
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
    for path in code_paths(job):
        yield path if path.is_dir() else path.parent


def code_paths(job: JobSpec) -> Iterator[Path]:
    """The folder of the task, and the paths in a command that exist here."""
    if job.task.startswith("/"):
        yield Path(job.task).parent
    for word in (*job.command, *job.resume_command):
        path = Path(word[word.find("/") :] if word.startswith(("/", "-")) else "")
        if path.is_absolute() and path.exists() and not SYSTEM & {path, *path.parents}:
            yield path


def data_folders(job: JobSpec, folder: Path) -> Iterator[Path]:
    """The folders of the data: staged paths, weights, and paths in the arguments of dataset()."""
    values = [value for value in job.dataset.values() if isinstance(value, str)]
    for value in (*job.data.stage, job.start_from, *values):
        path = folder / value
        # Any text may be one, and Path.exists has errors for some.
        if value and "://" not in value and os.path.exists(path):  # noqa: PTH110
            yield path if path.is_dir() else path.parent


@lru_cache(maxsize=8)  # the script and the record of a run both need it
def _links(tops: tuple[Path, ...]) -> tuple[Path, ...]:
    """The real paths of folders, and the folders of what links in them and in these lead to. Those
    nearest to the top are looked at first, LOOKS entries in all."""
    waiting, seen, looks = deque(tops), set[Path](), 0
    folders: dict[Path, None] = {}
    while waiting and looks < LOOKS:
        path = waiting.popleft()
        real = Path(os.path.realpath(path))
        if not real.is_dir():
            real = real.parent
        if path not in tops and SYSTEM & {real, *real.parents}:
            continue  # such as the Python of a virtual environment
        if real != path and os.path.lexists(path) and real.exists():
            folders[real] = None
        if real in seen or not path.is_dir():
            continue
        seen.add(real)
        with contextlib.suppress(OSError), os.scandir(real) as entries:
            for entry in islice(entries, LOOKS - looks):
                looks += 1
                if entry.is_symlink() or entry.is_dir():
                    waiting.append(Path(entry.path))
    return tuple(folders)
