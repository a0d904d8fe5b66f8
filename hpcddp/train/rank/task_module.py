"""The user's task module: model, dataset and loss, imported only on the nodes.

A task is a .py file beside the job file, or ``package.module:object``. It defines

    model(**[model]) -> nn.Module
    dataset(split, **[dataset]) -> a map-style Dataset of (input, target); split is train or eval
    loss(output, target) -> the mean over the batch, a scalar
    optimizer(model, train) -> Optimizer                 optional; train is the job's TrainSpec
    scheduler(optimizer, total_steps) -> LRScheduler     optional; stepped after every step
    metrics(output, target) -> {name: one value per sample}      optional; booleans are counted

and how to divide the model, if its structure does not show it:

    blocks(model) -> names of the modules that fsdp divides and train.recompute recomputes
    parts(model) -> names of modules that, called in this order, are the model, for pp
    tp_plan(model) -> {name of a module: "colwise", "rowwise" or a ParallelStyle}, for tp
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hpcddp.data import names
from hpcddp.errors import JobFileError
from hpcddp.spec import JobSpec

REQUIRED = ("model", "dataset", "loss")
CUTS = ("blocks", "parts", "tp_plan")
OPTIONAL = ("optimizer", "scheduler", "metrics", *CUTS)
SIGNATURES = {
    "model": "model(**options)",
    "dataset": "dataset(split, **options)",
    "loss": "loss(output, target)",
    "optimizer": "optimizer(model, train)",
    "scheduler": "scheduler(optimizer, total_steps)",
    "metrics": "metrics(output, target)",
    **{name: f"{name}(model)" for name in CUTS},
}
_NODE_FOLDERS = re.compile(
    r"\$(?:(SCRATCH|SLURM_TMPDIR|STAGE|TMPDIR)\b|\{(SCRATCH|SLURM_TMPDIR|STAGE|TMPDIR)\})"
)


class Task:
    """A task's functions, called with the job's options."""

    def __init__(self, source: object, name: str, spec: JobSpec) -> None:
        self.name = name
        self.held_out = True  # False to ignore the task's held-out samples
        self._spec = spec
        self._functions = {f: getattr(source, f, None) for f in REQUIRED + OPTIONAL}
        for function, defined in self._functions.items():
            if not callable(defined) and (function in REQUIRED or defined is not None):
                raise JobFileError(
                    f"function {function} is missing",
                    where=name,
                    hint=f"define {SIGNATURES[function]}",
                )
        self.loss = self._get("loss")
        self.metrics = self._functions["metrics"]
        self._check("loss", "output", "target")
        self._check("metrics", "output", "target")

    def has(self, function: str) -> bool:
        return self._functions[function] is not None

    def model(self) -> Any:
        """The model, on the CPU."""
        self._check("model", **self._spec.model)
        return self._get("model")(**self._spec.model)

    def dataset(self, split: str) -> Any:
        """The dataset of a split; None if the task has no such split."""
        if split == "eval" and not self.held_out:
            return None
        stage = self._spec.data.stage
        options = {key: _expand(key, value, stage) for key, value in self._spec.dataset.items()}
        self._check("dataset", split, **options)
        return self._get("dataset")(split, **options)

    def optimizer(self, model: Any) -> Any:
        self._check("optimizer", model, self._spec.train)
        return self._get("optimizer")(model, self._spec.train)

    def scheduler(self, optimizer: Any, total_steps: int) -> Any:
        self._check("scheduler", optimizer, total_steps)
        return self._get("scheduler")(optimizer, total_steps)

    def cut(self, name: str, model: Any) -> Any:
        """The result of a function of CUTS for the model; None if the task has no such function."""
        if not self.has(name):
            return None
        self._check(name, model)
        return self._get(name)(model)

    def _get(self, function: str) -> Callable[..., Any]:
        defined: Callable[..., Any] = self._functions[function]  # type: ignore[assignment]
        return defined

    def _check(self, function: str, *args: Any, **options: Any) -> None:
        """Check the arguments, for a plain error in place of a traceback."""
        if not self.has(function):
            return
        try:
            inspect.signature(self._get(function)).bind(*args, **options)
        except TypeError as error:
            raise JobFileError(
                f"{function}() cannot be called with the job's options: {error}",
                where=self.name,
                hint=f"it is {function}{inspect.signature(self._get(function))}: fix the option in "
                f"[model] or [dataset], or define it as {SIGNATURES[function]}",
            ) from None
        except ValueError:  # a builtin without a signature
            return


def _expand(key: str, value: Any, stage: Sequence[str]) -> Any:
    """Insert the node's own folders, which are known only there. Without staging, as in an estimate
    before the job, data is read from its source."""
    if not isinstance(value, str):
        return value
    if "HPCDDP_STAGE" not in os.environ:
        value = names.unstaged(value, stage)

    def folder(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        value = os.environ.get("HPCDDP_STAGE" if name == "STAGE" else name)
        if value is None:
            raise JobFileError(
                f"${name} is not set on this node",
                where=f"dataset.{key}",
                hint="list the data to copy in data.stage"
                if name == "STAGE"
                else "set it in the job file's [env], or write the path itself",
            )
        return value

    return _NODE_FOLDERS.sub(folder, value)


def load(spec: JobSpec, workdir: str) -> Task:
    """Import the job's task.

    Args:
        workdir: the folder of submission, where ``package.module`` is searched.

    Raises:
        JobFileError: the file, module, object or a function is missing.
    """
    module, colon, attribute = spec.task.partition(":")
    if spec.task.endswith(".py") or not colon:
        return Task(_import_file(Path(spec.task)), spec.task, spec)
    return Task(_import_object(module, attribute, workdir), spec.task, spec)


def _import_file(path: Path) -> object:
    if not path.is_file():
        raise JobFileError(
            "task file not found",
            where=str(path),
            hint="put it where all nodes can read it",
        )
    _put_on_path(path.parent)
    # Under its own name, so that DataLoader workers and pickles find it, unless such a module is
    # loaded: a task named types.py must not replace Python's.
    name = path.stem if path.stem not in sys.modules else f"hpcddp_task_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise JobFileError(
            "the task file cannot be imported", where=str(path), hint="use a .py file"
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _import_object(module: str, attribute: str, workdir: str) -> object:
    _put_on_path(Path(workdir))
    try:
        target: object = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module + ".").startswith(error.name + "."):
            raise  # the task's module exists, but a module that it imports does not
        raise JobFileError(
            f"no module named {error.name!r}",
            where=f"{module}:{attribute}",
            hint=f"put it in {workdir}, or install it for the Python that runs the job",
        ) from None
    for name in attribute.split("."):
        if not hasattr(target, name):
            raise JobFileError(
                f"module {module} has no {attribute}",
                where=f"{module}:{attribute}",
                hint="fix the name after the colon",
            )
        target = getattr(target, name)
    return target


def _put_on_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
