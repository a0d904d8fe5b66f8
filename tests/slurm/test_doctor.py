"""`hpcddp doctor` on real nodes: healthy ones, and one that computes at a quarter of its speed."""

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .desk import HPCDDP, Desk

PULSES = ((signal.SIGSTOP, 0.15), (signal.SIGCONT, 0.05))  # each and its seconds
FULL = ("--nodes", "3", "--gpus", "1", "--set", "preflight=full", "--set", "global_batch=6")


def ranks_of(node: str, module: str) -> list[int]:
    """The process ids of the ranks on a node of the sandbox that run a module."""
    pids = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdecimal() and module.encode() in (
                folder / "cmdline"
            ).read_bytes().split(b"\0"):
                names = (folder / "environ").read_bytes().split(b"\0")
                if f"SLURMD_NODENAME={node}".encode() in names:
                    pids.append(int(folder.name))
    return pids


@contextlib.contextmanager
def throttled(node: str, module: str = "hpcddp.doctor.check_rank") -> Iterator[None]:
    """Stop the ranks of a node three quarters of the time.

    Half of it would not do: other tests take as much from the ranks of the other nodes.
    """
    over = threading.Event()

    def pulse() -> None:
        while not over.is_set():
            pids = ranks_of(node, module)
            for which, seconds in PULSES:
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, which)
                time.sleep(seconds)

    thread = threading.Thread(target=pulse)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def checked(desk: Desk, *words: str) -> dict[str, object]:
    done = subprocess.run(
        [HPCDDP, "doctor", "--nodes", "3", "--procs", "1", "--json", *words],
        cwd=desk.folder, env=desk.slurm.environ, capture_output=True, text=True, check=False,
        timeout=240,
    )  # fmt: skip
    assert done.stdout, done.stderr
    facts: dict[str, object] = json.loads(done.stdout)
    return facts


def slow(facts: dict[str, object]) -> list[str]:
    """The nodes that are named for their speed."""
    rows = facts["findings"]
    assert isinstance(rows, list)
    return [row["where"] for row in rows if "of the speed" in row["what"]]


def test_healthy_nodes_are_not_named(desk: Desk) -> None:
    facts = checked(desk)
    assert slow(facts) == []
    nodes = facts["nodes"]
    assert isinstance(nodes, dict)
    assert [row["host"] for row in nodes["ranks"]] == desk.nodes[:3]
    assert len(nodes["pairs"]) == 3 and len(nodes["rates"]) == 3


def test_a_node_at_a_quarter_of_its_speed_is_named(desk: Desk) -> None:
    with throttled(desk.nodes[1]):
        for _ in range(3):  # other tests may slow the others down as much
            facts = checked(desk)
            if slow(facts):
                break
    assert slow(facts) == [desk.nodes[1]]
    done = desk.result("submit", "toy", "--nodes", "2", "--gpus", "1", "--dry-run")
    assert f"#SBATCH --exclude={desk.nodes[1]}\n" in done.stdout
    assert f"leaves out {desk.nodes[1]}, until " in done.stderr
    (row,) = json.loads(desk("nodes", "--json"))["nodes"]
    assert (row["host"], row["count"]) == (desk.nodes[1], 1)


@pytest.mark.full
@pytest.mark.alone
@pytest.mark.timeout(3600)
def test_fifty_healthy_starts_on_a_busy_machine_name_no_node(desk: Desk) -> None:
    busy = [
        subprocess.Popen(["/bin/sh", "-c", "while :; do :; done"])
        for _ in range(2 * (os.cpu_count() or 1))
    ]
    try:
        named = [slow(checked(desk)) for _ in range(40)]
        for _ in range(10):
            desk.submit(*FULL)
            desk.until(lambda s: s["state"] in ("COMPLETED", "FAILED"))
            named.append([a.cause for a in desk.attempts() if a.cause != "done"])
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert named == [[]] * 50
    assert json.loads(desk("nodes", "--json"))["nodes"] == []
