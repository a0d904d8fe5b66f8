"""The full preflight, as rank 0 sees it: whether a slow node ends the attempt."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lives import attempted, failing
from sites import Site

from hpcddp import record
from hpcddp.attempt.nodes import node_events
from hpcddp.errors import NodeUnfit
from hpcddp.rundir import RunDir, read_json
from hpcddp.topology import Rank
from hpcddp.train import attach
from hpcddp.train.rank import node_speed, rates


@pytest.fixture
def slow(site: Site, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run on n1 and n2, whose second node is slow in both measurements."""
    run, _ = failing(site)
    site.program("sinfo", "echo 'n[1-3]|idle'")
    monkeypatch.setenv("HPCDDP_RUN_DIR", str(run.path))
    for name, value in Rank(0, 2, 0, 1, 0).to_env().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rates, "work", lambda device: lambda seconds: (10, 1.0))
    monkeypatch.setattr(node_speed, "_again", lambda *a: {"n2": 0.5})
    monkeypatch.setattr(node_speed, "_summed", lambda world: 0.0)
    return run


def check(run: RunDir, attempt: int = 1) -> None:
    told = iter([["n1", "n2"], [10.0, 4.0]])  # hosts and rates of both ranks

    def gather(value: object) -> Any:
        return next(told, [value, value])

    world: Any = SimpleNamespace(
        size=2, is_main=True, device=torch.device("cpu"), barrier=lambda: None, gather=gather
    )
    with attach.written_down():
        node_speed.check(world, run, attempt, "full", lambda *a, **facts: None)


def test_an_attempt_of_a_users_own_loop_names_the_slow_node(slow: RunDir) -> None:
    with pytest.raises(NodeUnfit, match="n2 computes at 50%"):
        check(slow)
    error = read_json(slow.attempt(1).error) or {}
    assert (error["kind"], error["host"], error["bad_host"]) == ("node", "n2", True)
    assert list(error["faults"]) == ["n2"] and error["rank"] == 1


@pytest.mark.parametrize(
    ("sinfo", "spec", "before", "why"),
    [
        ("n[1-2]", {}, "", "no other node can take the place"),
        ("n[1-3]", {"requeue": {"enabled": False}}, "", "requeue.enabled is false"),
        ("n[1-3]", {}, "n2", "Slurm gave n2 again"),
    ],
)
def test_the_training_continues_if_the_next_attempt_could_not_avoid_the_node(
    site: Site, slow: RunDir, capfd: pytest.CaptureFixture[str],
    sinfo: str, spec: dict[str, Any], before: str, why: str,
) -> None:  # fmt: skip
    site.program("sinfo", f"echo '{sinfo}|idle'")
    job = record.read(slow)
    job.spec |= spec
    record.write(slow, job)
    slow.attempt(1).error.write_text(json.dumps({"kind": "node", "host": before}))
    check(slow, attempted(slow, 2).number)
    assert f"the ranks continue: {why}\n" in capfd.readouterr().out
    event = next(node_events.read(slow.node_events.read_text().splitlines()))
    assert (event.host, event.kind, event.source) == ("n2", "check", f"{slow.name}/2")
    assert not slow.attempt(2).error.exists()
