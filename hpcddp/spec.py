"""What was asked: JobSpec and its parts, as plain dataclasses.

The job file, the environment and the flags fill them (jobfile.py); the node reads them back from
the run dir's JSON. The field table below is the only place where a key is declared: its type, its
default, its limits and its one-line description all follow from it.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hpcddp.errors import JobFileError


def key(default: Any, text: str, *, least: float | None = None, choices: Iterable[str] = ()) -> Any:
    """Declare a key: default, description, smallest value allowed, allowed words."""
    metadata = {"text": text, "least": least, "choices": tuple(choices)}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=dict, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass
class TrainSpec:
    """How a step is taken."""

    lr: float = key(1e-3, "peak learning rate", least=0)
    weight_decay: float = key(0.01, "AdamW's weight decay", least=0)
    schedule: str = key("cosine", "learning rate after warm-up", choices=("constant", "cosine"))
    warmup_steps: int = key(0, "steps of linear warm-up", least=0)
    clip_norm: float = key(0.0, "largest gradient norm; 0 does not clip", least=0)
    micro_batch: int = key(0, "most samples of one forward pass on a rank; 0 for no limit", least=0)
    drop_last: bool = key(True, "leave out an epoch's incomplete last global batch")
    precision: str = key("fp32", "autocast", choices=("fp32", "bf16", "fp16"))
    compile: bool = key(False, "torch.compile the model")
    log_every: int = key(10, "steps between two metric lines", least=1)
    eval_every: int = key(1, "epochs between two evaluations; 0 for one at the end", least=0)


@dataclass
class DdpSpec:
    """DistributedDataParallel's own options."""

    static_graph: bool = key(False, "the graph is the same in every step")
    find_unused_parameters: bool = key(False, "some parameters get no gradient in some steps")


@dataclass
class DataSpec:
    """How samples are loaded."""

    workers: int = key(0, "DataLoader worker processes of one rank", least=0)
    eval_batch: int = key(256, "samples of one forward pass in evaluation", least=1)


@dataclass
class CheckpointSpec:
    """What is saved, and what is kept."""

    every: int = key(100, "steps between two checkpoints; 0 saves at the end only", least=0)
    keep: int = key(2, "newest checkpoints that are kept", least=1)
    best: str = key("loss", "evaluation metric whose best checkpoint is kept too; empty for none")
    best_mode: str = key("min", "which value of it is best", choices=("min", "max"))


@dataclass
class JobSpec:
    """One training job, as asked."""

    name: str = key("", "the run's name; the job's by default")
    task: str = key("", "task module: a .py file beside the job file, or package.module:object")
    nodes: str = key("1", "nodes: a number, or a range such as 1-4")
    gpus: int = key(1, "GPUs (ranks) of one node", least=1)
    launcher: str = key("srun", "how processes start on Slurm")
    global_batch: int = key(32, "samples of one optimizer step, over all ranks", least=1)
    epochs: int = key(0, "passes over the training set; 0 for as many as max_steps takes", least=0)
    max_steps: int = key(0, "stop after this many optimizer steps; 0 for no limit", least=0)
    seed: int = key(0, "seed of weights, order and augmentation", least=0)
    train: TrainSpec = dataclasses.field(default_factory=TrainSpec)
    ddp: DdpSpec = dataclasses.field(default_factory=DdpSpec)
    data: DataSpec = dataclasses.field(default_factory=DataSpec)
    checkpoint: CheckpointSpec = dataclasses.field(default_factory=CheckpointSpec)
    model: dict[str, Any] = key({}, "keyword arguments of the task's model()")
    dataset: dict[str, Any] = key({}, "keyword arguments of the task's dataset()")
    slurm: dict[str, Any] = key({}, "sbatch options by their long names")
    env: dict[str, Any] = key({}, "environment variables of the job")


SECTIONS: dict[str, Callable[[], Any]] = {
    "train": TrainSpec,
    "ddp": DdpSpec,
    "data": DataSpec,
    "checkpoint": CheckpointSpec,
}


@dataclass(frozen=True)
class Key:
    """One row of the key table: its type as written above, default, limits and description."""

    kind: str
    default: Any
    text: str
    least: float | None
    choices: tuple[str, ...]


def _rows(cls: Any, prefix: str = "") -> Iterable[tuple[str, Key]]:
    for f in dataclasses.fields(cls):
        if f.name in SECTIONS and not prefix:
            yield from _rows(SECTIONS[f.name], f"{f.name}.")
        else:
            m = f.metadata
            default = {} if f.default is dataclasses.MISSING else f.default
            yield prefix + f.name, Key(str(f.type), default, m["text"], m["least"], m["choices"])


KEYS: dict[str, Key] = dict(_rows(JobSpec))
TABLES = tuple(name for name, row in KEYS.items() if row.kind.startswith("dict"))


def nearest(word: str, known: Iterable[str], *, what: str = "key") -> str:
    """A hint that names what the user may have meant, or lists what there is."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if not close and "." not in word:  # "epoch" may mean a key of a section
        close = [n for n in names if n.rsplit(".", 1)[-1] == word][:1]
    if close:
        return f"did you mean {close[0]}?"
    return f"known {what}s: {', '.join(names)}" if names else f"there is no {what} yet"


def resolve(name: str, where: str) -> str:
    """The full dotted name of a key; JobFileError with the nearest one if there is none."""
    table, _, rest = name.partition(".")
    if name in KEYS and name not in TABLES:
        return name
    if table in TABLES and rest:
        return name
    raise JobFileError(f"unknown key {name!r}", where=where, hint=nearest(name, KEYS))


def check(name: str, value: Any, where: str, *, text: bool = False) -> Any:
    """The value of a key in its declared type, or JobFileError with key, value and remedy.

    Args:
        name: full dotted name, as `resolve` gives it.
        text: the value came as text (a flag or the environment) and is converted first.
    """
    if name not in KEYS:  # a member of a free table
        return _member(name, _from_text(value) if text else value, where)
    row = KEYS[name]
    if text:
        value = _convert(row.kind, value)
    if name == "nodes" and isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if row.kind == "float" and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value).__name__ != row.kind:
        raise JobFileError(f"{name} is {value!r}, but must be {_KINDS[row.kind]}", where=where)
    if row.least is not None and not value >= row.least:
        raise JobFileError(f"{name} is {value}, but must be at least {row.least:g}", where=where)
    if row.choices and value not in row.choices:
        raise JobFileError(
            f"{name} is {value!r}, but must be one of {', '.join(row.choices)}", where=where
        )
    return value


_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
}


def _convert(kind: str, value: str) -> Any:
    """Text to the declared type; what does not convert stays text, for `check` to refuse."""
    try:
        if kind == "int":
            return int(value)
        if kind == "float":
            return float(value)
    except ValueError:
        return value
    if kind == "bool":
        return {"true": True, "false": False, "1": True, "0": False}.get(value.lower(), value)
    return value


def _from_text(value: str) -> Any:
    """Text for a free table: a TOML value where it reads as one, else the text itself."""
    import tomllib

    try:
        return tomllib.loads(f"value = {value}")["value"] if "\n" not in value else value
    except tomllib.TOMLDecodeError:
        return value


def _member(name: str, value: Any, where: str) -> Any:
    table = name.partition(".")[0]
    if table in ("slurm", "env") and not isinstance(value, str | int | float | bool):
        raise JobFileError(f"{name} is {value!r}, but must be text, a number or a truth value",
                           where=where)  # fmt: skip
    return value


def build(values: Mapping[str, Any]) -> JobSpec:
    """A JobSpec from checked values by full dotted name."""
    spec = JobSpec()
    for name, value in values.items():
        table, _, rest = name.partition(".")
        if not rest:
            setattr(spec, name, value)
        elif table in SECTIONS:
            setattr(getattr(spec, table), rest, value)
        else:
            getattr(spec, table)[rest] = value
    return spec


def flatten(data: Mapping[str, Any]) -> dict[str, Any]:
    """A nested table, as a job file or `to_dict` has it, by dotted name; one level deep."""
    flat: dict[str, Any] = {}
    for name, value in data.items():
        if isinstance(value, Mapping) and (name in SECTIONS or name in TABLES):
            flat.update({f"{name}.{rest}": v for rest, v in value.items()})
        else:
            flat[name] = value
    return flat


def to_dict(spec: JobSpec) -> dict[str, Any]:
    """The spec as plain data, for the run dir's JSON."""
    return dataclasses.asdict(spec)


def from_dict(data: Mapping[str, Any], where: str = "job.json") -> JobSpec:
    """The spec that `to_dict` wrote."""
    flat = flatten(data)
    return build({resolve(name, where): check(name, v, where) for name, v in flat.items()})
