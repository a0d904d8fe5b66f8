"""Step 13: a run at TensorBoard, MLflow or Weights & Biases, sent from the lines in its run dir.

The lines are the truth. They may be sent to a tracker while the run trains, afterwards, or again:
it stays one run there over all attempts, and no step of it counts twice.

It imports ``observe`` and the rooms below; a tracker's package only in the tracker's own module.
The command line uses ``send`` and ``module``.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any, Protocol

from hpcddp import urls
from hpcddp.errors import UserError
from hpcddp.rundir import RunDir

# Tracker -> the module with its sink. Its package and its extra have the tracker's name.
TRACKERS = {
    "tensorboard": "hpcddp.trackers.to_tensorboard",
    "mlflow": "hpcddp.trackers.to_mlflow",
    "wandb": "hpcddp.trackers.to_wandb",
}


class Sink(Protocol):
    """A run that is open at a tracker.

    ``memory`` is plain data that the tracker finds again when it is opened the next time.
    """

    memory: dict[str, Any]

    def put(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """The values of a step, in the order of the steps; time in seconds since the epoch.

        Where a step is not after the last one, the run has gone back: the values from this step on
        that were put before do not count.
        """

    def say(self, text: str) -> None:
        """The attempts in words; the text replaces the one before."""

    def flush(self) -> bool:
        """Send the values; whether none of them can be lost now, even if this process is killed."""

    def close(self) -> None:
        """The end of this process's part."""


class Module(Protocol):
    """The functions of a tracker's module."""

    def knows(self, run: RunDir, memory: Mapping[str, Any]) -> bool:
        """Whether the tracker still has the steps that `memory` says were sent."""

    def open_sink(self, run: RunDir, memory: Mapping[str, Any]) -> Sink:
        """Open the run there: the one that is there already, if there is one."""


def plain(text: str) -> str:
    """A text without the users, passwords and signatures of the URLs in it."""
    return urls.hidden(text)


def missing(name: str) -> bool:
    """Whether the package of a tracker is not installed here."""
    return importlib.util.find_spec(name) is None


def module(name: str) -> Any:
    """The module of a tracker, as `Module` describes it.

    Raises:
        UserError: its package is not installed.
    """
    if missing(name):
        raise UserError(
            f"the package {name} is not installed here",
            where=f"tracker {name}",
            hint=f"pip install 'hpcddp[{name}]'",
        )
    return importlib.import_module(TRACKERS[name])
