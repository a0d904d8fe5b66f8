"""Step 13: send a run's metrics to TensorBoard, MLflow or Weights & Biases.

The source is the metrics files in the run folder. They may be sent while the run trains,
afterwards, or again: a tracker has one run for all attempts, and each step once.

It imports ``observe`` and the rooms below; a tracker's package only in the tracker's own module.
The command line uses ``send`` and ``module``.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any, Protocol

from hpcddp import urls
from hpcddp.errors import UserError, install_extra
from hpcddp.rundir import RunDir

# Tracker -> module of its sink. The tracker's package and extra have the same name.
TRACKERS = {
    "tensorboard": "hpcddp.trackers.to_tensorboard",
    "mlflow": "hpcddp.trackers.to_mlflow",
    "wandb": "hpcddp.trackers.to_wandb",
}


class Sink(Protocol):
    """A run that is open at a tracker.

    Attributes:
        memory: plain data that the tracker gets again when the run is opened the next time.
        place: the folder or URL of the run's data, for messages.
    """

    memory: dict[str, Any]
    place: str

    def put(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Add the values of a step; steps come in order.

        A step that is not after the last one repeats it: the new values replace those of this and
        later steps.

        Args:
            step: optimizer steps.
            time: seconds since the epoch.
            values: value of each curve.
        """

    def say(self, text: str) -> None:
        """Set the text about the attempts; it replaces the previous text."""

    def flush(self) -> bool:
        """Send the values; return whether they are safe even if this process is killed."""

    def close(self) -> None:
        """Close the run; a later process may open it again."""


class Module(Protocol):
    """The functions of a tracker's module."""

    def knows(self, run: RunDir, memory: Mapping[str, Any]) -> bool:
        """Whether the tracker still has the steps that were sent according to `memory`."""

    def open_sink(self, run: RunDir, memory: Mapping[str, Any]) -> Sink:
        """Open the run at the tracker, or make it if it does not exist."""


def plain(text: str) -> str:
    """Hide the users, passwords and signatures of the URLs in a text."""
    return urls.hidden(text)


def missing(name: str) -> bool:
    """Whether the package of a tracker is not installed."""
    return importlib.util.find_spec(name) is None


def module(name: str) -> Any:
    """The module of a tracker, as `Module` describes it.

    Raises:
        UserError: there is no such tracker, or its package is not installed or does not load.
    """
    if name not in TRACKERS:
        hint = f"use one of {', '.join(TRACKERS)}"
        raise UserError(f"unknown tracker {name!r}", where="metrics.trackers", hint=hint)
    where, hint = f"tracker {name}", install_extra(name)
    if missing(name):
        raise UserError(f"the package {name} is not installed", where=where, hint=hint)
    try:
        return importlib.import_module(TRACKERS[name])
    except ImportError as error:  # an incomplete or incompatible package
        raise UserError(
            f"cannot load the package {name}: {error}", where=where, hint=hint
        ) from None
