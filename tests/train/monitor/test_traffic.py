"""Bytes that went through this process's own sockets."""

import contextlib
import math
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcddp.train.monitor import traffic
from hpcddp.train.monitor.traffic import Traffic


@contextlib.contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
    with here, there:
        yield here, there


def send(ends: tuple[socket.socket, socket.socket], count: int) -> None:
    """From one end to the other, and arrived."""
    here, there = ends
    sender = threading.Thread(target=here.sendall, args=(bytes(count),))
    sender.start()
    while count:
        count -= len(there.recv(count))
    sender.join()


def test_what_was_sent_is_counted_once_and_by_its_sender() -> None:
    with connected() as ends:
        made = Traffic("gloo")
        send(ends, 3_000_000)
        assert made.take() == 3_000_000
        assert made.take() == 0


def test_a_connection_made_meanwhile_counts() -> None:
    made = Traffic("gloo")
    with connected() as ends:
        send(ends, 1000)
        assert made.take() == 1000


def test_pauses_do_not_count() -> None:
    with connected() as ends:
        made = Traffic("gloo")
        send(ends, 100)
        with made.paused():
            send(ends, 5000)
        send(ends, 10)
        assert made.take() == 110
        send(ends, 7)
        made.forget()
        assert made.take() == 0


def test_what_stays_in_the_kernel_is_no_traffic() -> None:
    made, ends = Traffic("gloo"), socket.socketpair()
    with ends[0], ends[1]:
        send(ends, 1000)
        assert made.take() == 0


def test_of_nccl_nobody_knows() -> None:
    assert math.isnan(Traffic("nccl").take())


def test_where_there_is_no_such_account_nobody_knows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(traffic, "FDS", tmp_path / "nowhere")
    assert math.isnan(Traffic("gloo").take())
