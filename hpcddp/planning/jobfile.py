"""Step 2: job file, environment and options -> JobSpec, checked, with the source of each value.

Precedence, highest first: options, HPCDDP_* variables, a few SBATCH_* variables, the job file, the
cluster profile, defaults.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcddp.errors import JobFileError, UserError
from hpcddp.keys import nearest
from hpcddp.planning import resources
from hpcddp.planning.software import software_keys
from hpcddp.spec import KEYS, JobSpec

LONGEST = 40  # characters of a name that is made from a command
PROGRAM = "write -- before a program, such as `-- python train.py`"
# HPCDDP_* variables that are not keys of a job: settings of the tool, and facts of a run.
RESERVED = {
    "HPCDDP_RUNS", "HPCDDP_SITE_CONFIG", "HPCDDP_SANDBOX", "HPCDDP_RUN_DIR", "HPCDDP_ATTEMPT",
    "HPCDDP_DEADLINE", "HPCDDP_SIGNAL", "HPCDDP_START_TIMEOUT", "HPCDDP_FORKED", "HPCDDP_DASK",
    "HPCDDP_WORLD", "HPCDDP_SHELL", "HPCDDP_SUPERVISOR", "HPCDDP_SECRET", "HPCDDP_PROGRESS",
    "HPCDDP_HEARTBEAT",
}  # fmt: skip

# Variables of sbatch -> our keys. No other SBATCH_* variable is read.
SBATCH_VARIABLES = {
    "SBATCH_PARTITION": "slurm.partition",
    "SBATCH_ACCOUNT": "slurm.account",
    "SBATCH_QOS": "slurm.qos",
    "SBATCH_TIMELIMIT": "slurm.time",
    "SBATCH_CONSTRAINT": "slurm.constraint",
    "SBATCH_RESERVATION": "slurm.reservation",
}

FORCED = "--sbatch"  # the source of values that Slurm is asked for whatever is known of it


@dataclass
class Layer:
    """Values from one place, by full dotted name.

    Args:
        sources: where each value was written.
        line: the words of the command line that the values come from, without the program.
        file: the path of the job file that they come from.
    """

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    line: tuple[str, ...] = ()
    file: str = ""

    def put(self, name: str, value: Any, where: str, *, text: bool = False) -> None:
        """Check and add one value."""
        name = KEYS.resolve(slurm_name(name), where)
        if name == "nodes" and type(value) is int:
            value = str(value)
        self.values[name] = KEYS.check(name, value, where, text=text)
        self.sources[name] = where

    def put_all(self, data: Mapping[str, Any], where: str) -> Layer:
        """Check and add a nested table."""
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
        raise JobFileError("no such file", where=str(path), hint="check the path") from None
    except OSError as error:
        hint = "check the path and the permissions of the file"
        what = f"cannot read the file: {error.strerror}"
        raise JobFileError(what, where=str(path), hint=hint) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        hint = "each line must be KEY = VALUE, with strings in quotes, or [TABLE]"
        raise JobFileError(f"is not TOML: {error}", where=str(path), hint=hint) from None


def is_program(word: str) -> bool:
    """Whether a word looks like a program or a script."""
    import shutil

    return word.endswith((".py", ".sh")) or bool(shutil.which(word))


def _with_program(word: str, line: Sequence[str]) -> str:
    """A hint for a program in the place of a job: the whole command, if it is known."""
    if word not in line:
        return PROGRAM
    before = [part for part in line if part != word]
    start = [name for end, name in ((".py", "python"), (".sh", "bash")) if word.endswith(end)]
    return f"use: {shlex.join(['hpcddp', *before, '--', *start, word])}"


def _named(folder: Path) -> dict[str, Path]:
    """The job files of a folder, by name."""
    return {p.stem: p for p in sorted(folder.glob("*.toml"))}


def known(folder: Path) -> dict[str, Path]:
    """The jobs that have a name: those of ./jobs hide shipped ones of the same name."""
    return _named(resources.folder("jobs")) | _named(folder / "jobs")


def find(job: str | None, folder: Path, line: Sequence[str] = ()) -> tuple[Path | str, list[str]]:
    """The job file that a word means, or the task itself for `package.module:object`.

    Args:
        job: a name, a path, `package.module:object`, or None for the only job of ./jobs. There,
            copies of the shipped jobs do not count: a clone of hpcddp has them.
        folder: the current folder.
        line: the words of the command line, without the program.

    Returns:
        The file or the task, and notes for the user.
    """
    if job is None:
        shipped = {path.read_bytes() for path in _named(resources.folder("jobs")).values()}
        local = _named(folder / "jobs")
        local = {name: p for name, p in local.items() if p.read_bytes() not in shipped}
        if len(local) > 1:
            raise UserError(
                f"./jobs has {len(local)} jobs: {', '.join(local)}",
                hint=f"add the name of one of them to the command, such as {next(iter(local))}",
            )
        if local:
            return next(iter(local.values())), []
        note = "no job given and ./jobs has none of yours; using the shipped job digits"
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
            hint=_with_program(job, line) if is_program(job) else nearest(job, jobs, what="job"),
        )
    return jobs[job], []


def file_layer(source: Path | str) -> Layer:
    """The job file's values, with explicit task, name and paths."""
    layer = Layer()
    if isinstance(source, str):
        layer.put("task", source, "command line")
        layer.put("name", source.rpartition(":")[0].rpartition(".")[2], "command line")
        return layer
    where = layer.file = str(source)
    layer.put_all(read_toml(source), where)
    if "name" not in layer.values:
        layer.put("name", source.stem, where)
    if weights := layer.values.get("start_from"):
        layer.values["start_from"] = str((source.parent / weights).absolute())
    layer.values = software_keys.placed(layer.values, source.parent.absolute())
    if layer.values.get("command"):
        if layer.values.get("task"):
            hint = "remove one of the two keys"
            raise JobFileError("has both a task and a command", where=where, hint=hint)
        return layer
    beside = source.with_suffix(".py")
    task = layer.values.get("task") or (beside.name if beside.is_file() else "")
    if not task:
        raise JobFileError(
            "has neither a task nor a command",
            where=where,
            hint=f'put {beside.name} beside it, or set task = "package.module:object" or command',
        )
    layer.values["task"] = task_reference(task, source.parent, where)
    layer.sources.setdefault("task", f"{beside.name} beside the job file")
    return layer


def command_layer(command: list[str]) -> Layer:
    """The name of a job without a job file: that of its command's first script, or program."""
    words = zip(["", *command], command, strict=False)
    scripts = (
        word
        for before, word in words
        if word.endswith((".py", ".sh")) and not re.fullmatch(r"-\w*c", before)  # bash -c "..."
    )
    program = Path(next(scripts, command[0])).stem
    name = re.sub(r"^\W+|[^\w.+-]+", "-", program)[:LONGEST].strip("-")
    layer = Layer()
    layer.put("name", name or "job", "command line")
    return layer


def task_reference(task: str, folder: Path, where: str) -> str:
    """`package.module:object` unchanged, or the absolute path of a file, which must exist."""
    if ":" in task and not task.endswith(".py"):
        return task
    path = (folder / task).absolute()
    if not path.is_file():
        raise JobFileError(
            f"task is {task!r}, but {path} does not exist" if not path.exists()
            else f"task is {task!r}, but {path} is not a file",
            where=where,
            hint="fix the path, which starts at the job file's folder, or write a module as "
            "package.module:object",
        )  # fmt: skip
    return str(path)


def variable(name: str) -> str:
    """The environment variable of a key: HPCDDP_TRAIN__LR is that of train.lr."""
    return "HPCDDP_" + name.upper().replace(".", "__")


def environment_layer(environ: Mapping[str, str]) -> Layer:
    """The values of HPCDDP_NODES, HPCDDP_TRAIN__LR and other variables of keys."""
    known = {variable(n): n for n in KEYS.rows}
    layer = Layer()
    for word in sorted(v for v in environ if v.startswith("HPCDDP_") and v not in RESERVED):
        table, _, rest = word.removeprefix("HPCDDP_").partition("__")
        name = known.get(word)
        if not name and table.lower() in KEYS.tables and rest:
            name = f"{table.lower()}.{rest if table == 'ENV' else rest.lower()}"
        if not name:
            raise UserError(
                "no key has this variable",
                where=word,
                hint=nearest(word, known, what="variable", many=f"unset {word}, or use the "
                             "variable of a key, such as HPCDDP_TRAIN__LR for train.lr"),
            )  # fmt: skip
        layer.put(name, environ[word], word, text=True)
    return layer


def sbatch_layer(environ: Mapping[str, str]) -> Layer:
    """The values of sbatch's variables in SBATCH_VARIABLES."""
    layer = Layer()
    for variable, name in SBATCH_VARIABLES.items():
        if environ.get(variable):
            layer.put(name, environ[variable], variable)
    return layer


def merge(layers: list[Layer]) -> tuple[JobSpec, dict[str, str]]:
    """The spec from layers, the highest precedence first, and the source of each set value."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for layer in reversed(layers):
        drop = {_replaced(layer), *software_keys.replaced(layer.values, layer.sources, values)}
        for name in drop:
            values.pop(name, None)
            sources.pop(name, None)
        values |= layer.values
        sources |= layer.sources
    return KEYS.build(values), sources


def _replaced(layer: Layer) -> str:
    """The key of lower layers that a layer replaces: GPUs per node replace those of the whole job,
    and the other way round."""
    each, total = layer.values.get("gpus"), layer.values.get("total_gpus")
    if each and total:
        what = f"gpus is {each} and total_gpus is {total}: only one of them can be set"
        raise UserError(what, where=layer.sources["total_gpus"], hint="remove one of the two")
    return "gpus" if total else "total_gpus" if each else ""


def load(
    job: str | None, flags: Layer, environ: Mapping[str, str], folder: Path
) -> tuple[list[Layer], list[str]]:
    """The layers of a job above its cluster profile, the highest precedence first, and notes."""
    layers = [flags, environment_layer(environ), sbatch_layer(environ)]
    command = flags.values.get("command")
    if command and job is None:
        return [*layers, command_layer(command)], []
    source, notes = find(job, folder, flags.line)
    below = file_layer(source)
    if command:
        below.values.pop("task", None)
    return [*layers, below], notes
