"""What an attempt records about its nodes."""

import json

import pytest
from lives import attempted, failing
from sites import Site

from hpcddp.attempt import ledger
from hpcddp.attempt.nodes import node_events
from hpcddp.rundir import RunDir


def recorded(run: RunDir) -> list[tuple[str, str]]:
    if not run.node_events.exists():
        return []
    with run.node_events.open("rb") as file:
        return [(event.host, event.kind) for event in node_events.read(file)]


def on_slurm(run: RunDir, number: int = 1) -> ledger.Attempt:
    mine = ledger.read(run.attempt(number))
    assert mine
    mine.slurm, mine.nodes = True, "n[1-3]"
    return mine


def test_nothing_is_recorded_of_an_attempt_without_trouble(site: Site) -> None:
    run, _ = failing(site)
    node_events.record_end(run, on_slurm(run), "crash")
    assert not run.node_events.exists()


@pytest.mark.parametrize(
    ("log", "hosts"),
    [
        ("srun: error: Node failure on n2\n", ["n2"]),
        ("srun: error: Node failure on n[2-3]\n", ["n2", "n3"]),
        ("", ["n1"]),  # no srun is left to name one: the script's node
    ],
)
def test_a_node_failure_names_its_nodes(site: Site, log: str, hosts: list[str]) -> None:
    run, _ = failing(site)
    run.attempt(1).log.write_text(log)
    node_events.record_end(run, on_slurm(run), "node failure")
    assert recorded(run) == [(host, "failure") for host in hosts]


def test_failed_checks_and_slow_ranks_are_recorded(site: Site) -> None:
    run, _ = failing(site)
    faults = {"n2": ["/tmp is full"], "n3": ["has 3 of 4 GPUs"]}
    run.attempt(1).error.write_text(json.dumps({"kind": "node", "faults": faults}))
    slow = [{"event": "slow", "what": what, "host": host, "ratio": 2.5}
            for what, host in (("compute", "n1"), ("data", "n2"), ("compute", "n1"))]  # fmt: skip
    run.attempt(1).metrics.write_text("".join(f"{json.dumps(row)}\n" for row in slow))
    node_events.record_end(run, on_slurm(run), "bad node")
    assert recorded(run) == [("n2", "check"), ("n3", "check"), ("n1", "slow")]
    attempted(run, 2)
    node_events.record_end(run, on_slurm(run, 2), "node failure")
    assert recorded(run)[3:] == [("n1", "failure")]


def test_damaged_lines_and_unknown_kinds_are_left_out() -> None:
    good = node_events.NodeEvent("n1", "check", "x", "run/1", 5.0)
    lines = [json.dumps(good._asdict()), "{", '{"host": "n2"}', '["n3"]',
             json.dumps(good._asdict() | {"kind": "of later"}),
             json.dumps(good._asdict() | {"time": "x"})]  # fmt: skip
    assert list(node_events.read(lines)) == [good]
