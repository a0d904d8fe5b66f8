"""Where the ranks of an attempt meet."""

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from sites import Site, record_run

from hpcddp.attempt import rendezvous
from hpcddp.rundir import RunDir


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


@pytest.fixture
def started(site: Site) -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.parametrize(("ranks", "seen"), [((0, 1), True), ((0, 0), False)])
def test_a_launcher_that_waits_in_each_rank_is_named(
    site: Site,
    started: list[subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    ranks: tuple[int, int],
    seen: bool,
) -> None:
    """srun in a rank waits for the CPUs that the rank itself has, and says so only in its words."""
    monkeypatch.setattr(rendezvous, "LIVES", 0.5)
    monkeypatch.setattr(rendezvous, "LOOK", 0.2)
    run = RunDir(site.runs / "program")
    run.path.mkdir(parents=True)
    record_run(run, gpus=2, spec={"command": ["bash", "x.sh"], "start_seconds": 2})
    run.attempt(1).path.mkdir(parents=True)
    site.program("srun", "read -t 60 <><(:)")
    for rank in ranks:
        words = {"HPCDDP_RUN_DIR": str(run.path), "HPCDDP_WORLD": f"{rank};4;;;"}
        srun = site.bin / "srun"
        started.append(subprocess.Popen([srun], env={**os.environ, **words}))
    rendezvous.watch(run, 1, started[0].pid, {"MASTER_PORT": "9"})
    assert ("srun runs in each rank." in capfd.readouterr().out) is seen
    assert run.attempt(1).error.exists()  # of start_seconds
