"""Parents that outlive attempts, and the supervisor that orders them to fork ranks: real processes,
with support/plain_srun.py in place of srun."""

import contextlib
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import time
from pathlib import Path

import pytest
from allocations import Allocation, alive
from connections import segments
from ranks import wait_for
from unkillable import unkillable

from hpcddp import processes
from hpcddp.attempt import error_record
from hpcddp.attempt.link import channel


def test_the_next_attempt_needs_no_import(place: Allocation) -> None:
    first = place.start()
    before = place.up(4)
    place.let(1, 7)
    assert first.wait(30) == 7
    text = place.log.read_text()
    assert "1: rank 1 ends" in text and "\x1e" not in text
    assert not alive(before)  # also those of the other node
    second = place.start()
    after = place.up(4)
    assert {rank["parent"] for rank in after} == {rank["parent"] for rank in before}
    assert [rank["port"] for rank in after] == ["1002"] * 4
    same = ("torch", "world", "handlers", "secret")
    assert [[rank[n] for n in same] for rank in before + after] == [
        [True, "4", ["0", "0"], False]
    ] * 8
    for rank in range(4):
        place.let(rank, 0)
    assert second.wait(30) == 0, place.log.read_text()
    assert sorted(place.log.read_text().splitlines()) == sorted(
        f"{rank}: rank {rank} {what}" for rank in range(4) for what in ("is up", "ends")
    )


def test_a_killed_rank_ends_the_others(place: Allocation) -> None:
    attempt = place.start()
    told = place.up(4)
    os.kill(int(str(told[2]["pid"])), signal.SIGKILL)
    assert attempt.wait(30) == 137
    assert not alive(told)
    assert "rank 2 on" in place.log.read_text() and "SIGKILL" in place.log.read_text()


def test_ranks_that_cannot_be_forked_end_the_attempt_and_no_parent(place: Allocation) -> None:
    place.start()
    (parent, other) = alive(place.up(4), "parent")
    place.let(0, 1)
    assert place.going[0].wait(30) == 1
    _, most = resource.prlimit(parent, resource.RLIMIT_NOFILE)
    count = len([*Path(f"/proc/{parent}/fd").iterdir()])
    resource.prlimit(parent, resource.RLIMIT_NOFILE, (count + 1, most))  # too few for a pipe
    assert place.start().wait(30) == 1
    assert ": [Errno 24] Too many open files" in place.log.read_text()
    assert "lost node" not in place.log.read_text()
    resource.prlimit(parent, resource.RLIMIT_NOFILE, (most, most))
    place.start()
    assert alive(place.up(4), "parent") == {parent, other}


def test_the_error_of_a_script_is_shown_alone(place: Allocation) -> None:
    attempt = place.start()
    place.up(4)
    place.let(1, "none")
    assert attempt.wait(30) == 1
    text = place.log.read_text()
    assert "1: ValueError: invalid literal" in text and "During handling" not in text


def test_a_stop_signal_reaches_all_ranks(place: Allocation) -> None:
    attempt = place.start()
    place.up(4)
    attempt.send_signal(signal.SIGUSR2)
    assert attempt.wait(30) == 85
    assert place.log.read_text().count("saves") == 4


def test_ranks_that_are_stopped_before_they_run_never_do(place: Allocation) -> None:
    attempt = place.start()
    wait_for(lambda: place.reached, "the supervisor")
    attempt.send_signal(signal.SIGTERM)
    assert attempt.wait(60) == 143
    assert not [*place.run.path.glob("up-*")]


def test_a_stop_signal_between_two_attempts_ends_the_next_one(place: Allocation) -> None:
    place.start()
    parents = alive(place.up(4), "parent")
    for rank in range(4):
        place.let(rank, 1)
    assert place.going[0].wait(30) == 1
    for pid in parents:
        os.kill(pid, signal.SIGTERM)  # Slurm's, to all processes of the step
    time.sleep(1.0)
    assert place.start().wait(30) == 143
    assert not [*place.run.path.glob("up-2-*")]
    place.start()
    assert alive(place.up(4), "parent") == parents


@pytest.mark.parametrize("place", [{"kill_wait": 3.0}], indirect=True)
def test_a_stop_signal_to_ranks_that_then_fail_ends_the_next_ones(place: Allocation) -> None:
    (place.run.path / "slow").touch()
    attempt = place.start()
    told = place.up(4)
    for pid in alive(told, "parent"):
        os.kill(pid, signal.SIGUSR2)  # Slurm's; the ranks take their time
    os.kill(int(str(told[1]["pid"])), signal.SIGKILL)
    assert attempt.wait(60) == 137
    (place.run.path / "slow").unlink()
    assert place.start().wait(30) == 128 + signal.SIGUSR2
    assert not [*place.run.path.glob("up-2-*")]
    place.start()
    place.up(4)


def test_the_next_ranks_wait_for_the_end_of_the_last_ones(place: Allocation) -> None:
    (place.run.path / "slow").touch()
    attempt = place.start()
    told = place.up(4)
    attempt.kill()
    wait_for(lambda: attempt.poll() is not None, "the end of the attempt's process")
    place.start()
    time.sleep(2.0)
    assert not [*place.run.path.glob("up-2-*")] and len(alive(told)) == 4
    (place.run.path / "slow").unlink()
    place.up(4)
    assert not alive(told)


def test_without_a_supervisor_ranks_and_parents_leave(place: Allocation) -> None:
    attempt = place.start()
    told = place.up(4)
    os.kill(place.supervisor, signal.SIGKILL)
    assert attempt.wait(30) == 1
    wait_for(lambda: not alive(told) and not alive(told, "parent"), "the end of all")
    place.start()
    place.up(4)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_do_not_outlive_the_process_that_waits_for_them(
    place: Allocation, number: int
) -> None:
    attempt = place.start()
    told = place.up(4)
    attempt.send_signal(number)
    wait_for(lambda: not alive(told), "the end of the ranks")
    assert attempt.wait(30) == (143 if number == signal.SIGTERM else -9)
    place.start()
    assert alive(place.up(4), "parent") == alive(told, "parent")


def test_all_leave_with_the_script(place: Allocation) -> None:
    attempt = place.start()
    told = place.up(4)
    place.script.kill()
    place.script.wait()
    wait_for(lambda: not alive(told) and not alive(told, "parent"), "the end of all")
    assert attempt.wait(30) == 1


def test_all_leave_before_the_job_ends(place: Allocation) -> None:
    attempt = place.start()
    told = place.up(4)
    for rank in range(4):
        place.let(rank, 3)
    assert attempt.wait(30) == 3
    channel.dismiss(place.script.pid)
    assert not alive(told, "parent")
    channel.dismiss(place.script.pid)  # nobody is there


def test_a_parent_that_is_lost_ends_the_attempt_and_the_next_one(place: Allocation) -> None:
    """Without a spare: the nodes that are left are too few."""
    attempt = place.start()
    told = place.up(4)
    os.kill(int(str(told[0]["parent"])), signal.SIGKILL)
    assert attempt.wait(60) == 137
    assert not alive(told)
    assert place.start().wait(60) == 137
    assert json.loads(place.run.attempt(2).error.read_text())["kind"] == "lost"
    assert not [*place.run.path.glob("up-2-*")]


def test_parents_that_cannot_start_end_the_attempt(place: Allocation) -> None:
    (place.run.path / "torch.py").write_text("raise SystemExit('no torch here')")
    os.environ["PYTHONPATH"] = str(place.run.path)
    try:
        attempt = place.start()
    finally:
        del os.environ["PYTHONPATH"]
    assert attempt.wait(30) == 1
    assert "no torch here" in place.log.read_text()


def test_a_node_without_python_is_known_at_once(
    place: Allocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAIN_SRUN", json.dumps({"1": ["false"]}))
    assert place.start().wait(60) == 1
    assert "1 of 2 nodes can start ranks" in place.log.read_text()
    error = json.loads(place.run.attempt(1).error.read_text())
    assert (error["kind"], error["host"]) == ("lost", "n1")


def test_a_spare_stands_in_for_a_node_without_python(
    place: Allocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAIN_SRUN", json.dumps({"1": ["false"]}))
    place.start(nodes=3)
    assert len(alive(place.up(4), "parent")) == 2


@pytest.mark.full
def test_nobody_waits_long_for_a_spare(place: Allocation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIN_SRUN", json.dumps({"1": ["sleep", "600"]}))
    place.start(nodes=3)
    assert len(alive(place.up(4), "parent")) == 2


def paused(pids: set[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)


def continued(pids: set[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("place", [{"size": 2, "heartbeat": 60.0}], indirect=True)
def test_a_spare_replaces_a_node_that_is_killed(place: Allocation) -> None:
    attempt = place.start(nodes=3)
    told = place.up(4)
    first, second = (int(str(told[rank]["parent"])) for rank in (0, 2))
    os.kill(second, signal.SIGKILL)
    assert attempt.wait(60) == 137
    assert "lost node" in place.log.read_text()
    place.start(nodes=3)
    parents = [int(str(rank["parent"])) for rank in place.up(4)]
    assert parents[:2] == [first, first] and second not in parents


@pytest.mark.parametrize("place", [{"size": 2, "heartbeat": 60.0}], indirect=True)
def test_a_lost_node_that_is_back_is_a_spare(place: Allocation) -> None:
    attempt = place.start(nodes=3)
    first, second = (int(str(place.up(4)[rank]["parent"])) for rank in (0, 2))
    os.kill(second, signal.SIGKILL)
    assert attempt.wait(60) == 137
    attempt = place.start(nodes=3)
    third = int(str(place.up(4)[2]["parent"]))
    wait_for(lambda: "is back, as a spare" in place.log.read_text(), "the return of a node")
    os.kill(third, signal.SIGKILL)
    assert attempt.wait(60) == 137
    place.start(nodes=3)
    parents = [int(str(rank["parent"])) for rank in place.up(4)]
    assert parents[:2] == [first, first] and not {second, third} & {*parents}


@pytest.mark.full
@pytest.mark.parametrize("place", [{"size": 2, "heartbeat": 60.0}], indirect=True)
def test_a_lost_node_is_back_when_its_ranks_are_gone(place: Allocation) -> None:
    place.start(nodes=3)
    told = place.up(4)
    with unkillable(int(str(told[2]["pid"]))):
        os.kill(int(str(told[2]["parent"])), signal.SIGKILL)
        assert place.going[0].wait(60) == 137
        place.start(nodes=3)
        here = {*map(int, parents_of(place))}
        wait_for(lambda: {*map(int, parents_of(place))} - here, "a new parent")
        time.sleep(8)  # it would have imported torch
        assert "is back" not in place.log.read_text()
    wait_for(lambda: "is back, as a spare" in place.log.read_text(), "the return of a node")


@pytest.mark.full
@pytest.mark.parametrize("place", [{"size": 2, "heartbeat": 5.0}], indirect=True)
def test_a_spare_replaces_a_node_that_is_silent(place: Allocation) -> None:
    attempt = place.start(nodes=3)
    told = place.up(4)
    silent = alive(told[2:]) | alive(told[2:], "parent")
    paused(silent | alive(told[:2]))  # ranks that wait for it make no step
    assert attempt.wait(60) == 137
    assert "no sign of life for" in place.log.read_text()
    place.start(nodes=3)
    assert not alive(place.up(4), "parent") & silent
    continued(silent)  # the node has come back: it is fenced
    wait_for(lambda: not alive(told[2:]), "the end of its ranks")


@pytest.mark.parametrize("place", [{"size": 2, "heartbeat": 5.0}], indirect=True)
def test_a_parent_without_a_processor_is_not_lost(place: Allocation) -> None:
    attempt = place.start()
    told = place.up(4)
    parent = alive(told[2:], "parent")
    paused(parent)
    with pytest.raises(subprocess.TimeoutExpired):
        attempt.wait(10)  # the ranks of the other node make steps
    continued(parent)
    for rank in range(4):
        place.let(rank, 0)
    assert attempt.wait(30) == 0


@pytest.mark.parametrize("place", [{"size": 2, "heartbeat": 5.0}], indirect=True)
def test_a_job_that_is_suspended_is_not_lost(place: Allocation) -> None:
    attempt = place.start()
    told = place.up(4)
    everybody = alive(told) | alive(told, "parent") | {place.supervisor}
    paused(everybody)
    with pytest.raises(subprocess.TimeoutExpired):
        attempt.wait(10)
    continued(everybody)
    for rank in range(4):
        place.let(rank, 0)
    assert attempt.wait(30) == 0


@pytest.mark.parametrize("place", [{"size": 2, "heartbeat": 60.0}], indirect=True)
def test_the_ranks_meet_elsewhere_without_the_first_node(place: Allocation) -> None:
    attempt = place.start(nodes=3)
    told = place.up(4)
    assert {rank["address"] for rank in told} == {"127.0.0.1"}
    os.kill(int(str(told[0]["parent"])), signal.SIGKILL)
    assert attempt.wait(60) == 137
    place.start(nodes=3)
    assert {rank["address"] for rank in place.up(4)} == {error_record.host()}
    hosts = json.loads(place.run.attempt(2).hosts.read_text())
    assert hosts == {"in_order": [error_record.host()] * 2}


def test_strangers_at_the_port_disturb_nobody(place: Allocation) -> None:
    attempt = place.start()
    parent = int(str(place.up(4)[0]["parent"]))
    variables = processes.environ_of(parent).decode().split("\0")
    address = next(v for v in variables if v.startswith("HPCDDP_SUPERVISOR="))
    where = ("127.0.0.1", int(address.rpartition(":")[2]))
    for text in (b"", b"{\n", b'{"hello": -1, "host": "elsewhere", "protocol": 1}\n'):
        with socket.create_connection(where) as stranger:
            stranger.sendall(text)
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    for rank in range(4):
        place.let(rank, 0)
    assert attempt.wait(30) == 0
    place.start()
    assert {rank["parent"] for rank in place.up(4)} >= {parent}


@pytest.mark.parametrize("place", [{"kill_wait": 3.0}], indirect=True)
def test_what_a_rank_leaves_is_gone_before_the_next_ones_start(place: Allocation) -> None:
    """Also what comes to light only when its own parent has been killed."""
    (place.run.path / "leaves").touch()
    attempt = place.start()
    told = place.up(4)
    wait_for(lambda: len(left_over()) == 4, "the processes of the ranks")
    (place.run.path / "leaves").unlink()
    os.kill(int(str(told[0]["pid"])), signal.SIGKILL)
    assert attempt.wait(30) == 137
    assert not left_over()
    place.start()
    place.up(4)


def left_over() -> list[int]:
    """Processes that ranks have started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes() == b"sleep\x007654\0":
                found.append(int(path.parent.name))
    return found


@pytest.mark.full
@pytest.mark.parametrize("place", [{"size": 2, "heartbeat": 5.0}], indirect=True)
def test_a_silent_spare_is_not_used(place: Allocation) -> None:
    """It is noticed while the others train."""
    attempt = place.start(nodes=3)
    told = place.up(4)
    (spare,) = {*map(int, parents_of(place))} - alive(told, "parent")
    paused({spare})
    try:
        time.sleep(8)
        os.kill(int(str(told[2]["parent"])), signal.SIGKILL)
        assert attempt.wait(60) == 137
        place.start(nodes=3)
        assert spare not in alive(place.up(4), "parent")  # the killed one is back
    finally:
        continued({spare})


def parents_of(place: Allocation) -> list[int]:
    mine = f"HPCDDP_RUN_DIR={place.run.path}".encode()
    return [p for p in processes.named("hpcddp-parent") if mine in processes.environ_of(p)]


def test_a_node_sends_few_messages_whatever_its_ranks_do(place: Allocation) -> None:
    """They make a hundred steps a second."""
    place.start()
    place.up(4)
    before, began = segments(place.supervisor), time.monotonic()
    time.sleep(3.0)
    after, seconds = segments(place.supervisor), time.monotonic() - began
    assert len(before) == len(after) == 2
    assert all(0 < b - a <= 10 * seconds for a, b in zip(before, after, strict=True))


@pytest.mark.full
@pytest.mark.parametrize("place", [{"kill_wait": 3.0}], indirect=True)
@pytest.mark.parametrize("victim", [1, 3], ids=["a rank of its node", "another node's"])
def test_a_node_whose_rank_does_not_end_is_lost(place: Allocation, victim: int) -> None:
    attempt = place.start()
    ranks = [int(str(rank["pid"])) for rank in place.up(4)]
    with unkillable(ranks[0]):
        os.kill(ranks[victim], signal.SIGKILL)
        assert attempt.wait(60) == 137
    assert "its ranks do not end" in place.log.read_text()
    assert json.loads(place.run.attempt(1).error.read_text())["kind"] == "lost"
