"""Step 13: the view of a run, filled in from its folder.

A ``Viewer`` reads each line of a run once, so that it may look again and again.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Collection, Iterator
from typing import Any

import msgspec

from hpcddp.attempt.error_record import is_peer
from hpcddp.attempt.joblog import line
from hpcddp.errors import RunError
from hpcddp.observe import history
from hpcddp.observe.curves import Curves, Whole
from hpcddp.observe.history import NODES, AttemptSummary
from hpcddp.observe.rank_history import Heat
from hpcddp.observe.series import Series, means, median, thin
from hpcddp.observe.view import AttemptView, Event, RankView, View
from hpcddp.rundir import RunDir
from hpcddp.slurm.hostlist import expand_hosts
from hpcddp.submit import status
from hpcddp.submit.status import Status

POINTS = 400  # of a curve
WAITS = 0.1  # share of a step that may be waiting for data
WORDS = 200  # records shown in words, and lines of the log
TAIL = 1 << 14  # bytes of the log
MIDDLE = ("step_s", "samples_per_s")  # shown by their median
WARNINGS = ("slow", "waiting", "skipped", "rollback", "diverged", "checkpoint_failed")  # events


class Viewer:
    """The views of a run, one for each look.

    Args:
        points: of a curve, at most.
        skip: curves of which only the newest value is read.
    """

    def __init__(self, run: RunDir, points: int = POINTS, skip: Collection[str] = ()) -> None:
        self.run, self._points, self._skip = run, points, skip
        self.curves = Curves(run, {*skip} - {"step_s"})  # that one gives the mean
        self._heat = Heat(run)
        self._drawn: dict[str, Any] = {}
        self._summaries: dict[int, AttemptSummary] = {}

    def look(self, state: Status | None = None, seconds: float = math.inf) -> View:
        """The run now.

        Args:
            state: from its backend; without it, from the run folder alone.
            seconds: for metrics and figures; the next look reads the rest.

        Raises:
            RunError: its folder is damaged.
        """
        try:
            return self._look(state, seconds)
        except FOREIGN as error:
            raise unreadable(self.run, error) from error

    def _look(self, state: Status | None, seconds: float) -> View:
        state = state or status.known(self.run)
        until = time.monotonic() + seconds
        new = self.curves.update(seconds)
        self._heat.update(until - time.monotonic())
        filled = {name: s for name, s in self.curves.series.items() if len(s)}
        if new:
            self._draw({name: s for name, s in filled.items() if name not in self._skip})
        view = View(state, time.time(), self.curves.behind or self._heat.behind, **self._drawn)
        view.newest = {name: series.values[-1] for name, series in filled.items()}
        state.step = max(state.step, self.curves.step)
        self._rates(view)
        self._attempts(view)
        self._ranks(view)
        view.heat, view.heat_steps = self._heat.rows(), self._heat.steps
        view.events = list(_in_words(self.curves.events[-WORDS:]))
        view.log, view.hint = self._log(), self._hint(view)
        return view

    def _draw(self, filled: dict[str, Series]) -> None:
        """Fill in the fields that need all points of the curves; called only after new points."""
        size = self._points
        self._drawn = {
            "curves": {name: thin(series, size) for name, series in filled.items()},
            "means": {name: means(s, size) for name, s in filled.items() if len(s) > size},
            "medians": {name: median(filled[name]) for name in MIDDLE if name in filled},
        }

    def _rates(self, view: View) -> None:
        start: dict[str, Any] = next(
            (e for e in reversed(self.curves.events) if e["event"] == "start"), {}
        )
        view.global_batch = start.get("global_batch") or 0
        view.steps_per_epoch = start.get("steps_per_epoch") or 0
        view.status.total_steps = status.whole(start.get("total_steps")) or view.status.total_steps
        recent = self.curves.recent
        if len(recent) > 1 and recent[-1][0] > recent[0][0]:
            view.step_s = (recent[-1][1] - recent[0][1]) / (recent[-1][0] - recent[0][0])
        if view.step_s and view.status.total_steps and view.status.state == "RUNNING":
            view.to_go_s = view.step_s * (view.status.total_steps - view.status.step)

    def _attempts(self, view: View) -> None:
        spent = self.curves.spent
        mean = spent.values[-1] / spent.steps[-1] if spent.steps else 0.0
        ended, begins = view.status.created, _begins(self.curves.events)
        over = view.status.final
        for summary in history.summaries(self.run, over=over, kept=self._summaries):
            attempt = AttemptView(summary, lost_s=summary.lost * mean)
            attempt.waited_s = max(0.0, summary.began - ended)
            trained_from = begins.get(summary.attempt, summary.began)
            attempt.started_s = max(0.0, trained_from - summary.began)
            ended = summary.ended or view.now
            view.held_s += max(0.0, ended - summary.began)
            view.attempts.append(attempt)
        kept = view.status.step - (view.attempts[-1].summary.lost if view.attempts else 0)
        view.useful_s = min(view.held_s, spent.before(kept))
        view.started_s = sum(attempt.started_s for attempt in view.attempts)
        view.lost_s = sum(attempt.lost_s for attempt in view.attempts)
        view.lost_steps = sum(attempt.summary.lost for attempt in view.attempts)
        pairs = list(itertools.pairwise(view.attempts))
        view.interruptions = len(pairs)
        view.interrupted_s = sum(a.lost_s + b.waited_s + b.started_s for a, b in pairs)

    def _ranks(self, view: View) -> None:
        events = self.curves.events
        last = next((i for i in range(len(events))[::-1] if events[i]["event"] == "ranks"), 0)
        reports = events[last].get("ranks") or [] if events else []
        ranks = {rank.rank: rank for report in reports if (rank := _placed(report))}
        view.ranks = list(ranks.values())
        for rank in view.ranks:
            for name in FIGURES:
                values = getattr(self._heat.newest, name)
                setattr(rank, name, values[rank.rank] if rank.rank < len(values) else None)
        for (_, number), text in _slow(events[last:]).items():
            if number in ranks:
                ranks[number].state, ranks[number].note = "slow", text
        error = (view.attempts[-1].summary.error if view.attempts else None) or {}
        for rank in _dead(error, view.ranks):
            rank.state, rank.note = "dead", str(error.get("message") or "error")

    def _hint(self, view: View) -> str:
        """The newest advice on data, while training waits for data."""
        if view.newest.get("wait_s", 0.0) < WAITS * view.newest.get("step_s", math.inf):
            return ""
        hints = (e.get("hint") for e in reversed(self.curves.events) if e["event"] == "waiting")
        return str(next(hints, None) or "")

    def _log(self) -> list[str]:
        """The log's last lines."""
        try:
            with self.run.log.open("rb") as f:
                f.seek(max(0, f.seek(0, 2) - TAIL))
                return f.read().decode("utf-8", "replace").splitlines()[-WORDS:]
        except OSError:
            return []


# Errors that a record of another form causes.
FOREIGN = (ArithmeticError, LookupError, TypeError, ValueError, AttributeError)


def unreadable(run: RunDir, error: Exception) -> RunError:
    """The error for a run whose records have another form."""
    message = f"cannot read the records of this run: {type(error).__name__}: {error}"
    hint = "another program or version may have written them"
    return RunError(message, where=str(run.path), hint=hint)


FIGURES = ("step_s", "wait_s", "busy_s", "samples_per_s", "memory", "gpu")


def _begins(events: list[dict[str, Any]]) -> dict[int, float]:
    """When each attempt's training began, seconds since the epoch."""
    times = {e["attempt"]: e.get("time") or 0.0 for e in events if e["event"] == "start"}
    return {attempt: when for attempt, when in times.items() if math.isfinite(when)}


def _words(event: dict[str, Any]) -> str:
    """A record in words, or its name where another version wrote it."""
    try:
        return line(event)
    except FOREIGN:
        return str(event["event"])


def _dead(error: dict[str, Any], ranks: list[RankView]) -> list[RankView]:
    """The ranks that ended an attempt, without those that failed because of them."""
    if is_peer(error):
        return []
    if error.get("kind") == NODES:
        hosts = expand_hosts(str(error["host"]))
        return [rank for rank in ranks if rank.host in hosts]
    return [rank for rank in ranks if rank.rank == error.get("rank")]


class _RankReport(msgspec.Struct):
    rank: Whole
    node: int
    local: int
    host: str
    device: str


def _placed(report: Any) -> RankView | None:
    """A rank, if its report names its place."""
    try:
        return RankView(*msgspec.structs.astuple(msgspec.convert(report, _RankReport)))
    except msgspec.ValidationError:
        return None


def _slow(events: list[dict[str, Any]]) -> dict[tuple[str, int], str]:
    """(Part, rank) -> words, for each part of a rank's step (compute or data) that is slow."""
    slow: dict[tuple[str, int], str] = {}
    for event in events:
        part = str(event.get("what")), event.get("rank", 0)
        if event["event"] == "slow":
            slow[part] = _words(event)
        elif event["event"] == "recovered":
            slow.pop(part, None)
    return slow


def _in_words(events: list[dict[str, Any]]) -> Iterator[Event]:
    """Records in words."""
    for event in events:
        text, step = _words(event), event.get("step") or 0
        if text and event["event"] != "ranks":
            unsaved = event["event"] == "end" and event.get("saved", step) != step
            warns = event["event"] in WARNINGS or unsaved
            yield event.get("time") or 0.0, event["attempt"], step, text, warns
