"""Step 13: the present state of a run, as the plain data that watch, report and dashboard show.

``viewer.py`` fills it in.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from hpcddp.observe.history import AttemptSummary
from hpcddp.submit.status import Status

Curve = tuple[list[int], list[float]]  # steps and values
Event = tuple[float, int, int, str, bool]  # time, attempt, step, text, whether it is a warning


@dataclass
class RankView:
    """One rank: its place, its newest figures, and its failure if any."""

    rank: int
    node: int
    local: int
    host: str
    device: str
    step_s: float | None = None  # seconds of a step
    wait_s: float | None = None  # of these, for its data
    busy_s: float | None = None  # of these, on its own work
    samples_per_s: float | None = None
    memory: float | None = None  # bytes
    gpu: float | None = None  # percent
    state: str = ""  # "", slow, or dead
    note: str = ""  # in words


@dataclass
class AttemptView:
    """An attempt, and its cost in seconds."""

    summary: AttemptSummary
    waited_s: float = 0.0  # from the end of the one before, or from the submission
    started_s: float = 0.0  # from its start to its first step
    lost_s: float = 0.0  # in lost steps

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with that of the summary beside it."""
        costs = {name: value for name, value in vars(self).items() if name != "summary"}
        return {**self.summary.to_dict(), **costs}


@dataclass
class View:
    """A run now. Its strings come from the run: a page shows them as text, never as markup."""

    status: Status
    now: float  # seconds since the epoch
    behind: bool = False  # some of the run's metrics are not read yet
    global_batch: int = 0
    steps_per_epoch: int = 0
    step_s: float | None = None  # seconds of a step, lately, with all that comes between steps
    to_go_s: float | None = None
    held_s: float = 0.0  # seconds for which the run had its nodes
    useful_s: float = 0.0  # of these, in steps whose result was kept
    started_s: float = 0.0  # of these, before the first step of each attempt
    lost_s: float = 0.0  # of these, in lost steps
    lost_steps: int = 0  # whose result was not saved, so that a later attempt repeats them
    interruptions: int = 0  # attempts that another one followed
    interrupted_s: float = 0.0  # their cost: lost steps, the wait, and the next start
    attempts: list[AttemptView] = field(default_factory=list)
    # Steps and values; of a long one its peaks, and in ``means`` the mean of each stretch.
    curves: dict[str, Curve] = field(default_factory=dict)
    means: dict[str, Curve] = field(default_factory=dict)
    newest: dict[str, float] = field(default_factory=dict)  # value of each curve
    medians: dict[str, float] = field(default_factory=dict)  # of step_s and samples_per_s
    ranks: list[RankView] = field(default_factory=list)
    # By rank, for each of ``heat_steps``: its own work and wait as a multiple of the median rank's.
    heat: list[list[float | None]] = field(default_factory=list)
    heat_steps: list[int] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    hint: str = ""  # advice, while training waits for its data

    @property
    def efficiency(self) -> float | None:
        """The useful part of its time on the nodes; None before the first step."""
        return self.useful_s / self.held_s if self.held_s and "step_s" in self.newest else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with the version of its form."""
        data: dict[str, Any] = {**vars(self), "efficiency": self.efficiency, "schema_version": 1}
        data["status"] = self.status.to_dict()
        data["attempts"] = [attempt.to_dict() for attempt in self.attempts]
        data["ranks"] = [asdict(rank) for rank in self.ranks]
        return data
