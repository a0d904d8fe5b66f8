"""How long a node is avoided."""

import json
from pathlib import Path

import pytest

from hpcddp.attempt.nodes.node_events import NodeEvent
from hpcddp.planning.trust import node_history
from hpcddp.planning.trust.node_history import DAY, HOUR, NodeHistory

NOW = 1e9


def events(*kinds: str, ago: float = 0.0) -> list[NodeEvent]:
    return [NodeEvent("n1", kind, f"what {i}", f"run/{i}", NOW - ago + i)
            for i, kind in enumerate(kinds)]  # fmt: skip


@pytest.mark.parametrize(
    ("kinds", "hours"),
    [
        (["check"], 1),
        (["check", "failure"], 2),
        (["check"] * 5, 16),
        (["check"] * 30, 168),
        (["slow"], 0),
        (["slow", "slow"], 1),
        (["slow", "check"], 1),
        (["slow", "slow", "slow", "check"], 2),
    ],
)
def test_a_node_is_avoided_longer_each_time(kinds: list[str], hours: float) -> None:
    history = NodeHistory("n1", events(*kinds))
    last = history.counted(NOW)[-1].time if hours else 0
    assert history.until(NOW) == (last + hours * HOUR if hours else 0)


def test_it_ends_by_itself_and_is_forgotten_after_a_month() -> None:
    history = NodeHistory("n1", events("check", ago=2 * HOUR))
    assert history.until(NOW) < NOW and history.count(NOW) == 1
    assert NodeHistory("n1", events("check", ago=31 * DAY)).count(NOW) == 0


def test_what_is_forgiven_counts_no_more() -> None:
    history = NodeHistory("n1", events("check", "check"), forgiven=NOW)
    assert history.count(NOW) == 1  # the second one came later
    history.forgiven = NOW + 10
    assert history.until(NOW) == 0


def test_a_person_has_the_last_word() -> None:
    history = NodeHistory("n1", wanted=NOW + DAY)
    assert history.until(NOW) == NOW + DAY and history.why(NOW) == "you left it out"
    history.add(events("check"))
    assert history.until(NOW) == NOW + DAY and history.why(NOW) == "you left it out"
    history.wanted = 0
    assert history.why(NOW) == "what 0"


def test_the_same_event_counts_once() -> None:
    history = NodeHistory("n1")
    assert history.add(events("check") * 2) and not history.add(events("check"))
    assert history.count(NOW) == 1


@pytest.mark.parametrize("text", ["", "{", "[]", '{"events": 7}', '{"events": [{"host": "n1"}]}',
                                  '{"forgiven": "x"}'])  # fmt: skip
def test_a_damaged_file_is_an_empty_history(tmp_path: Path, text: str) -> None:
    path = tmp_path / "n1.json"
    path.write_text(text)
    history = node_history.load(path)
    assert (history.host, history.events) == ("n1", [])
    history.add(events("check"))
    node_history.save(history, path)
    assert node_history.load(path).events == events("check")
    assert json.loads(path.read_text())["host"] == "n1"
