"""What happened on a node, and until when new jobs avoid it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from hpcddp.attempt.nodes import node_events
from hpcddp.attempt.nodes.node_events import NodeEvent
from hpcddp.rundir import write_json

HOUR, DAY = 3600.0, 86400.0  # seconds
FIRST, LONGEST = HOUR, 7 * DAY  # how long a node is avoided: doubled each time, and at most
MEMORY = 30 * DAY  # older events do not count
PAIR = 2  # slow ranks, in different attempts, that count as one event
LATEST = 1e11  # seconds since the epoch; a later time is damage
MOST = 50  # events of a node that are kept


@dataclass
class NodeHistory:
    """One node.

    Args:
        events: oldest first.
        forgiven: events until then do not count, in seconds since the epoch.
        wanted: a person leaves the node out until then.
    """

    host: str
    events: list[NodeEvent] = field(default_factory=list)
    forgiven: float = 0.0
    wanted: float = 0.0

    def add(self, events: Iterable[NodeEvent]) -> bool:
        """Add events that are not known yet; whether there were any."""
        known = {(event.source, event.kind): event for event in self.events}
        merged = {(event.source, event.kind): event for event in events} | known
        self.events = sorted(merged.values(), key=lambda event: event.time)[-MOST:]
        return len(merged) > len(known)

    def counted(self, now: float) -> list[NodeEvent]:
        """The events that count now: slow ranks only if there are PAIR of them."""
        since = max(self.forgiven, now - MEMORY)
        recent = [event for event in self.events if event.time > since]
        slow = [event for event in recent if event.kind == node_events.SLOW]
        return recent if len(slow) >= PAIR else [e for e in recent if e not in slow]

    def count(self, now: float) -> int:
        """How often the node counts as bad."""
        kinds = [event.kind for event in self.counted(now)]
        slow = kinds.count(node_events.SLOW)
        return len(kinds) - slow + slow // PAIR

    def until(self, now: float) -> float:
        """Until when new jobs avoid it, in seconds since the epoch; in the past for no more."""
        if not (count := self.count(now)):
            return self.wanted
        last = self.counted(now)[-1].time
        return max(self.wanted, last + min(LONGEST, FIRST * 2.0 ** (min(count, 20) - 1)))

    def why(self, now: float) -> str:
        """Why it is avoided, in words."""
        events, count = self.counted(now), self.count(now)
        if not events or self.wanted > self.until(now) - 1:
            return "you left it out"
        times = "" if count == 1 else f" ({count} times)"
        return f"{events[-1].what}{times}"


def load(path: Path) -> NodeHistory:
    """The history in a file; an empty one if the file is missing or damaged."""
    history = NodeHistory(path.stem)
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        data = json.loads(path.read_text(encoding="utf-8"))
        lines = [json.dumps(row) for row in data.get("events", [])]
        history.add(event for event in node_events.read(lines) if event.host == path.stem)
        history.forgiven = _moment(data.get("forgiven", 0))
        history.wanted = _moment(data.get("wanted", 0))
    return history


def _moment(value: object) -> float:
    """A time in seconds since the epoch; 0 for what is none."""
    return float(value) if isinstance(value, int | float) and 0 <= value < LATEST else 0.0


def save(history: NodeHistory, path: Path) -> None:
    """Write a history, atomically."""
    write_json(path, {
        "host": history.host, "forgiven": history.forgiven, "wanted": history.wanted,
        "events": [event._asdict() for event in history.events],
    })  # fmt: skip
