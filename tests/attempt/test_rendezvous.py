"""Where the ranks of an attempt meet."""

import json
import os
import signal
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


WAITS = "srun runs in each rank, and has started nothing"
LATE = "no process group after 2 s"


@pytest.mark.parametrize(
    ("ranks", "inner", "why"),
    [((0, 1), False, WAITS), ((0, 0), False, LATE), ((0, 1), True, LATE)],
    ids=["in each rank", "in one", "has started a step"],
)
def test_ranks_that_wait_in_a_launcher_end_with_the_reason(
    site: Site,
    started: list[subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
    ranks: tuple[int, int],
    inner: bool,
    why: str,
) -> None:
    """srun in a rank waits for the CPUs that the rank itself has."""
    monkeypatch.setattr(rendezvous, "LIVES", 0.5)
    monkeypatch.setattr(rendezvous, "LOOK", 0.2)
    monkeypatch.setattr(rendezvous, "LOOK_ALL", 0.2)
    run = RunDir(site.runs / "program")
    run.path.mkdir(parents=True)
    record_run(run, gpus=2, spec={"command": ["bash", "x.sh"], "start_seconds": 2})
    run.attempt(1).path.mkdir(parents=True)
    programs = [(rank, "0", "srun") for rank in ranks] + [(0, "1", "train")] * inner
    for name in {name for _, _, name in programs}:  # each once: bash reads it as it runs
        site.program(name, "read -t 60 <><(:)")
    for rank, step, name in programs:
        words = {"HPCDDP_RUN_DIR": str(run.path), "HPCDDP_WORLD": f"{rank};4;0;;"}
        environ = {**os.environ, **words, "SLURM_STEP_ID": step}
        started.append(subprocess.Popen([site.bin / name], env=environ))
    rendezvous.watch(run, 1, started[0].pid, {"MASTER_PORT": "9"})
    error = json.loads(run.attempt(1).error.read_text())
    assert error["message"].split(": ", 1)[1].startswith(why) and error["kind"] == "mistake"
    assert started[0].wait() == -signal.SIGTERM
