"""Where the ranks of an attempt meet."""

import socket
from pathlib import Path

import pytest

from hpcddp.attempt import rendezvous


def test_a_port_is_outside_of_what_the_kernel_gives_and_can_be_bound() -> None:
    text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    low, high = (int(n) for n in text.split())
    ports = [rendezvous.free_port() for _ in range(20)]
    assert len(set(ports)) > 1
    for port in ports:
        assert 1024 < port < 65536 and not low <= port <= high
        with socket.socket() as s:
            s.bind(("", port))


def test_a_port_in_use_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("", rendezvous.free_port()))
        taken.listen()
        used = taken.getsockname()[1]

        class Next:
            def sample(self, ports: list[int], count: int) -> list[int]:
                return [used, *(p for p in ports if p != used)][:count]

        monkeypatch.setattr("random.SystemRandom", Next)
        assert rendezvous.free_port() != used
