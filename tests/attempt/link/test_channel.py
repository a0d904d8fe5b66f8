"""Messages between the processes of a job, and strangers at its port."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from hpcddp.attempt.link import channel
from hpcddp.attempt.link.channel import Channel


@pytest.fixture
def port() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)
        yield listener


def accepted(port: socket.socket, secret: str, messages: list[channel.Message]) -> threading.Thread:
    """Serve one connection in a thread: take in what comes, and answer each message."""

    def serve() -> None:
        end = Channel(port.accept()[0], secret)
        while not end.closed:
            for message in end.receive():
                messages.append(message)
                end.send(got=message)

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


def next_of(end: Channel) -> channel.Message:
    while not end.closed:
        if found := end.receive():
            return found[0]
    raise EOFError


def test_both_ends_that_know_the_secret_talk(port: socket.socket) -> None:
    got: list[channel.Message] = []
    server = accepted(port, "secret", got)
    end = channel.connect("127.0.0.1", port.getsockname()[1], "secret")
    end.send(text="näher\n", number=3)
    assert next_of(end) == {"got": {"text": "näher\n", "number": 3}}
    end.close()
    server.join(10)
    assert got == [{"text": "näher\n", "number": 3}] and not server.is_alive()


def test_a_peer_without_the_secret_is_not_heard(port: socket.socket) -> None:
    got: list[channel.Message] = []
    server = accepted(port, "secret", got)
    with pytest.raises(OSError):
        channel.connect("127.0.0.1", port.getsockname()[1], "guessed")
    server.join(10)
    assert not got and not server.is_alive()


@pytest.mark.parametrize(
    "said",
    [
        b'{"order": "start"}\n',
        b"GET / HTTP/1.1\r\n\r\n",
        b"x" * 5000,
        b"[" * 1000 + b"\n",
        b"1 2\n",
        b"\xff \xc3\xa9\n",
        b"",
    ],
)
def test_a_stranger_at_the_port_is_sent_away(port: socket.socket, said: bytes) -> None:
    got: list[channel.Message] = []
    server = accepted(port, "secret", got)
    with socket.create_connection(port.getsockname()[:2]) as stranger, contextlib.suppress(OSError):
        stranger.sendall(said)
        stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(1000):
            pass
    server.join(10)
    assert not got and not server.is_alive()


def test_a_server_that_does_not_know_the_secret_is_no_supervisor(port: socket.socket) -> None:
    def pretend() -> None:
        with port.accept()[0] as sock:
            sock.sendall(b"1\n")
            sock.recv(1000)
            sock.sendall(b"1\n")

    thread = threading.Thread(target=pretend)
    thread.start()
    with pytest.raises(ConnectionRefusedError, match="not of this job"):
        channel.connect("127.0.0.1", port.getsockname()[1], "secret")
    thread.join(10)


def test_processes_of_one_user_meet_by_a_name() -> None:
    name = "hpcddp-test-channel"
    with pytest.raises(OSError):
        channel.connect_here(name)
    with channel.listen_here(name) as listener:
        with pytest.raises(OSError):
            channel.listen_here(name)
        here = channel.connect_here(name)
        sock, _ = listener.accept()
        assert channel.of_this_user(sock)
        there = Channel(sock)
        here.send(a=1)
        here.send(a=2)
        here.close()
        messages: list[channel.Message] = []
        while not there.closed:
            messages += there.receive()
        assert messages == [{"a": 1}, {"a": 2}]


def test_a_long_message_waits_for_a_slow_reader() -> None:
    mine, theirs = socket.socketpair()
    end, peer = Channel(mine), Channel(theirs)
    sent: list[channel.Message] = [{"text": "x" * 900_000}, {"beat": 1}]
    for message in sent:
        end.send(**message)
    assert not end.closed
    got: list[channel.Message] = []
    while len(got) < len(sent):
        got += peer.receive()
        end.send(beat=2)
    assert got[:2] == sent
    end.close()
    peer.close()


def test_a_peer_that_reads_nothing_blocks_nobody() -> None:
    mine, theirs = socket.socketpair()
    end = Channel(mine)
    while not end.closed:
        end.send(text="x" * 10_000)
    theirs.close()
