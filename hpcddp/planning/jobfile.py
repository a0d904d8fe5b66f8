"""Step 2: job file, environment and flags -> JobSpec, checked, with the source of each value.

Precedence, highest first: flags, HPCDDP_*, a named few of SBATCH_*, the job file, the cluster
profile, defaults.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcddp.errors import JobFileError, UserError
from hpcddp.keys import nearest
from hpcddp.planning import resources
from hpcddp.spec import KEYS, JobSpec

PROGRAM = "a program comes after --, such as: hpcddp submit -- python train.py"
# HPCDDP_* variables that are settings of the tool or facts of a run, not keys of a job.
RESERVED = {
    "HPCDDP_RUNS",
    "HPCDDP_SITE_CONFIG",
    "HPCDDP_SANDBOX",
    "HPCDDP_RUN_DIR",
    "HPCDDP_ATTEMPT",
    "HPCDDP_DEADLINE",
    "HPCDDP_SIGNAL",
    "HPCDDP_START_TIMEOUT",
    "HPCDDP_FORKED",
    "HPCDDP_DASK",
}

# Variables for each sbatch of a user -> our keys; hpcddp reads no other SBATCH_* variable.
SBATCH_VARIABLES = {
    "SBATCH_PARTITION": "slurm.partition",
    "SBATCH_ACCOUNT": "slurm.account",
    "SBATCH_QOS": "slurm.qos",
    "SBATCH_TIMELIMIT": "slurm.time",
    "SBATCH_CONSTRAINT": "slurm.constraint",
    "SBATCH_RESERVATION": "slurm.reservation",
}


@dataclass
class Layer:
    """Values from one place, by full dotted name; `sources` says where each was written."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def put(self, name: str, value: Any, where: str, *, text: bool = False) -> None:
        """Check one value and take it in."""
        name = KEYS.resolve(slurm_name(name), where)
        if name == "nodes" and type(value) is int:
            value = str(value)
        self.values[name] = KEYS.check(name, value, where, text=text)
        self.sources[name] = where

    def put_all(self, data: Mapping[str, Any], where: str) -> Layer:
        """Take in a nested table."""
        for name, value in KEYS.flatten(data).items():
            self.put(name, value, where)
        return self


def slurm_name(name: str) -> str:
    """`slurm.ntasks_per_node` is the option ntasks-per-node."""
    return name.replace("_", "-") if name.startswith("slurm.") else name


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file, or JobFileError that names file and line."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise JobFileError("there is no such file", where=str(path)) from None
    except OSError as error:
        raise JobFileError(f"cannot be read: {error.strerror}", where=str(path)) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        hint = "a line is KEY = VALUE, with texts in quotes, or a [TABLE]"
        raise JobFileError(f"is not TOML: {error}", where=str(path), hint=hint) from None


def is_program(word: str) -> bool:
    """Whether a word in the place of a job looks like a program or a script."""
    import shutil

    return word.endswith((".py", ".sh")) or bool(shutil.which(word))


def _named(folder: Path) -> dict[str, Path]:
    """The job files of a folder, by name."""
    return {p.stem: p for p in sorted(folder.glob("*.toml"))}


def known(folder: Path) -> dict[str, Path]:
    """The jobs that a name can mean: those of ./jobs before the shipped ones."""
    return _named(resources.folder("jobs")) | _named(folder / "jobs")


def find(job: str | None, folder: Path) -> tuple[Path | str, list[str]]:
    """The job file that a word means, or the task itself for `package.module:object`.

    Args:
        job: a name, a path, `package.module:object`, or None for the only job of ./jobs.
        folder: the current folder.

    Returns:
        The file or the task, and notes for the user.
    """
    if job is None:
        local = _named(folder / "jobs")
        if len(local) > 1:
            raise UserError(
                f"there are {len(local)} jobs in ./jobs: {', '.join(local)}",
                hint="name one of them, such as: hpcddp submit " + next(iter(local)),
            )
        if local:
            return next(iter(local.values())), []
        note = "no job named and none in ./jobs: taking the shipped job digits"
        return resources.folder("jobs") / "digits.toml", [note]
    if job.endswith(".toml") or "/" in job:
        return folder / job, []
    if ":" in job:
        return job, []
    jobs = known(folder)
    if job not in jobs:
        raise JobFileError(
            f"unknown job {job!r}",
            where=str(folder / "jobs"),
            hint=PROGRAM if is_program(job) else nearest(job, jobs, what="job"),
        )
    return jobs[job], []


def file_layer(source: Path | str) -> Layer:
    """The job file's values; its task, name and paths are made explicit."""
    layer = Layer()
    if isinstance(source, str):
        layer.put("task", source, "command line")
        layer.put("name", source.rpartition(":")[0].rpartition(".")[2], "command line")
        return layer
    where = str(source)
    layer.put_all(read_toml(source), where)
    if "name" not in layer.values:
        layer.put("name", source.stem, where)
    if weights := layer.values.get("start_from"):
        layer.values["start_from"] = str((source.parent / weights).absolute())
    if layer.values.get("command"):
        if layer.values.get("task"):
            raise JobFileError(
                "names a task and a command", where=where, hint="leave one of them out"
            )
        return layer
    beside = source.with_suffix(".py")
    task = layer.values.get("task") or (beside.name if beside.is_file() else "")
    if not task:
        raise JobFileError(
            "names no task",
            where=where,
            hint=f'put {beside.name} beside it, or set task = "package.module:object", or command',
        )
    layer.values["task"] = task_reference(task, source.parent, where)
    layer.sources.setdefault("task", f"{beside.name} beside the job file")
    return layer


def command_layer(command: list[str]) -> Layer:
    """The name of a job that is a program alone: of its first script, or of itself."""
    script = next((word for word in command if word.endswith((".py", ".sh"))), command[0])
    layer = Layer()
    layer.put(
        "name",
        re.sub(r"^\W+|[^\w.+-]+", "-", Path(script).stem).strip("-") or "job",
        "command line",
    )
    return layer


def task_reference(task: str, folder: Path, where: str) -> str:
    """`package.module:object` as it is; a file as an absolute path, which must exist."""
    if ":" in task and not task.endswith(".py"):
        return task
    path = (folder / task).absolute()
    if not path.is_file():
        raise JobFileError(f"task is {task!r}, but {path} is not a file", where=where)
    return str(path)


def environment_layer(environ: Mapping[str, str]) -> Layer:
    """HPCDDP_NODES, HPCDDP_TRAIN__LR and their like; the dot of a key is two underscores."""
    known = {"HPCDDP_" + n.upper().replace(".", "__"): n for n in KEYS.rows}
    layer = Layer()
    for variable in sorted(v for v in environ if v.startswith("HPCDDP_") and v not in RESERVED):
        table, _, rest = variable.removeprefix("HPCDDP_").partition("__")
        name = known.get(variable)
        if not name and table.lower() in KEYS.tables and rest:
            name = f"{table.lower()}.{rest if table == 'ENV' else rest.lower()}"
        if not name:
            raise UserError(
                "no key has this variable",
                where=variable,
                hint=nearest(variable, known, what="variable"),
            )
        layer.put(name, environ[variable], variable, text=True)
    return layer


def sbatch_layer(environ: Mapping[str, str]) -> Layer:
    """The named few of SBATCH_*."""
    layer = Layer()
    for variable, name in SBATCH_VARIABLES.items():
        if environ.get(variable):
            layer.put(name, environ[variable], variable)
    return layer


def merge(layers: list[Layer]) -> tuple[JobSpec, dict[str, str]]:
    """The spec from layers, the highest first, and the source of each value that is set."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for layer in reversed(layers):
        values |= layer.values
        sources |= layer.sources
    return KEYS.build(values), sources


def load(
    job: str | None, flags: Layer, environ: Mapping[str, str], folder: Path
) -> tuple[list[Layer], list[str]]:
    """The layers of a job above its cluster's profile, the highest first, and notes."""
    layers = [flags, environment_layer(environ), sbatch_layer(environ)]
    command = flags.values.get("command")
    if command and job is None:
        return [*layers, command_layer(command)], []
    source, notes = find(job, folder)
    below = file_layer(source)
    if command:
        below.values.pop("task", None)
    return [*layers, below], notes
