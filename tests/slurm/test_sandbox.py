"""The sandbox itself: what it starts is a real Slurm, and nothing of it stays behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpcddp.errors import SandboxError
from hpcddp.rundir import RunDir
from hpcddp.sandbox import hosts, own_processes, state
from hpcddp.sandbox.cluster import Sandbox, Settings
from hpcddp.sandbox.rehearsed_run import RehearsedRun
from slurm.conftest import Slurm, clean_environ

QUIET = Settings(nodes=1, gpus=0, accounting=False)


@pytest.fixture
def folder(slurm: Slurm) -> Iterator[Path]:
    """Of a second sandbox, beside the one of the session; it is brought down afterwards."""
    with tempfile.TemporaryDirectory(prefix="hpcddp-", dir="/tmp") as parent:
        try:
            yield Path(parent, "box")
        finally:
            Sandbox(Path(parent, "box")).down()


def wait_until(condition: Callable[[], object], what: str, seconds: float = 200) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def submit(slurm: Slurm, *options: str) -> str:
    done = slurm.run("sbatch", "--parsable", "--output=/dev/null", *options)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def job(slurm: Slurm, number: str) -> dict[str, str]:
    text = slurm.run("scontrol", "--oneliner", "show", "job", number).stdout
    return dict(word.split("=", 1) for word in text.split() if "=" in word)


def hpcddp_sandbox(*argv: str) -> subprocess.CompletedProcess[str]:
    script = "from hpcddp.cli.sandbox import sandbox; sandbox()"
    argv = (sys.executable, "-c", script, *argv)
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)


def left_of(folder: Path) -> list[str]:
    """Command lines of the processes that name the folder, or that have a file open in it."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            links = [str(link.readlink()) for link in (entry / "fd").iterdir()]
            words = (entry / "cmdline").read_text() + (entry / "environ").read_text()
        except OSError:
            continue
        if str(folder) in words or any(link.startswith(f"{folder}/") for link in links):
            found.append(words[:200])
    return found


def test_all_nodes_are_idle_and_up_again_changes_nothing(slurm: Slurm) -> None:
    before = slurm.sandbox.status()
    assert before["state"] == "up"
    assert before["nodes"] == dict.fromkeys(slurm.sandbox.nodes, "idle")
    assert len(before["nodes"]) == 4
    assert slurm.sandbox.up(Settings(nodes=2)) is False
    assert slurm.sandbox.status() == before


def test_a_job_gets_its_gpus_and_its_nodes_resolve(slurm: Slurm, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(
        "#!/bin/sh\n"
        "srun --label sh -c 'echo \"$CUDA_VISIBLE_DEVICES $SLURMD_NODENAME $(hostname)\"'\n"
        "getent hosts $(scontrol show hostnames)\n"
    )
    output = tmp_path / "job.out"
    options = ("--nodes=2", "--gpus-per-node=4", "--ntasks-per-node=1", f"--output={output}")
    submit(slurm, "--wait", *options, str(script))
    lines = output.read_text().splitlines()
    one, two = slurm.sandbox.nodes[:2]
    host = {node: node for node in (one, two)}
    if not slurm.sandbox.status()["own_hostnames"]:
        host = dict.fromkeys((one, two), socket.gethostname())
    assert sorted(lines[:2]) == [f"0: 0,1,2,3 {one} {host[one]}", f"1: 0,1,2,3 {two} {host[two]}"]
    assert [line.split() for line in lines[2:]] == [["127.0.0.1", one], ["127.0.0.1", two]]


def test_a_job_in_high_preempts_one_in_low(slurm: Slurm, folder: Path) -> None:
    sandbox = Sandbox(folder)
    sandbox.up(Settings(nodes=1, accounting=False, grace=0, kill_wait=1))
    second = Slurm(sandbox, clean_environ(sandbox))
    low = submit(second, "--exclusive", "--wrap=exec sleep 60")
    wait_until(lambda: job(second, low)["JobState"] == "RUNNING", "the job in low does not start")
    high = submit(second, "--exclusive", "--partition=high", "--wrap=exec sleep 60")
    wait_until(lambda: job(second, high)["JobState"] == "RUNNING", "no preemption")
    after = job(second, low)
    assert (after["JobState"], after["Restarts"]) == ("PENDING", "1")


def test_a_second_one_beside_it_with_accounting_leaves_nothing(slurm: Slurm, folder: Path) -> None:
    hpcddp_sandbox("up", "--folder", str(folder), "--nodes", "2", "--set", "KillWait=7")
    sandbox = Sandbox(folder)
    second = Slurm(sandbox, clean_environ(sandbox))
    assert folder.stat().st_mode & 0o777 == 0o700
    assert set(sandbox.nodes).isdisjoint(slurm.sandbox.nodes)
    assert "KillWait                = 7 sec" in second.run("scontrol", "show", "config").stdout
    number = submit(second, "--wrap=srun sleep 300 & setsid sleep 300 & wait")
    asked = ("sacct", "--noheader", "--parsable2", "--format=JobID,State", f"--jobs={number}")
    wait_until(lambda: f"{number}.0|RUNNING" in second.run(*asked).stdout, "sacct knows no step")
    ports = state.load(folder).site.ports.values()  # type: ignore[union-attr]
    assert left_of(folder)

    hpcddp_sandbox("down", "--folder", str(folder))
    assert left_of(folder) == []
    assert not folder.exists()
    assert folder not in hosts.owners(hosts.HOSTS.read_text())
    for port in ports:
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0
    assert slurm.sandbox.status()["state"] == "up"


def test_env_puts_a_shell_on_it(slurm: Slurm) -> None:
    lines = hpcddp_sandbox("env", "--folder", str(slurm.sandbox.folder)).stdout
    shell = ["sh", "-c", f'{lines}exec "$0" "$@"', "sinfo", "--noheader", "--format=%N"]
    shown = subprocess.run(shell, capture_output=True, text=True, timeout=20, check=True).stdout
    assert shown.split()[0].startswith(slurm.sandbox.nodes[0][:-1])


def test_a_failed_start_says_why_and_leaves_nothing(slurm: Slurm, folder: Path) -> None:
    with pytest.raises(SandboxError, match=r"(?s)slurmctld.*NoSuchThing"):
        Sandbox(folder).up(Settings(nodes=1, accounting=False, extra={"NoSuchThing": "1"}))
    assert left_of(folder) == []
    assert not folder.exists()
    assert folder not in hosts.owners(hosts.HOSTS.read_text())


def test_what_a_kill_left_behind_is_replaced(slurm: Slurm, folder: Path) -> None:
    sandbox = Sandbox(folder)
    sandbox.up(QUIET)
    record = state.load(folder)
    assert record is not None
    own_processes.end(record.daemons.values(), signal.SIGKILL, 10)
    assert sandbox.status()["state"] == "broken"
    assert sandbox.up(QUIET) is True
    assert sandbox.status()["state"] == "up"


def test_a_folder_with_a_long_path_works_too(slurm: Slurm, folder: Path) -> None:
    long = folder / ("a b" * 40)
    sandbox = Sandbox(long)
    try:
        sandbox.up(QUIET)
        home = Path(sandbox.status()["home"])
        assert home != long
        assert home.stat().st_mode & 0o777 == 0o700
    finally:
        sandbox.down()
    assert not home.exists()
    assert not long.exists()


def test_daemons_stop_and_start(slurm: Slurm, folder: Path) -> None:
    sandbox = Sandbox(folder)
    sandbox.up(QUIET)
    node = sandbox.nodes[0]
    for name in ("slurmctld", f"slurmd-{node}"):
        sandbox.stop_daemon(name)
        assert sandbox.status()["state"] == "degraded"
        sandbox.start_daemon(name)
        wait_until(lambda: sandbox.status()["nodes"] == {node: "idle"}, f"{name} is not back")
    with pytest.raises(SandboxError, match="slurmd-n99"):
        sandbox.stop_daemon("slurmd-n99")


def test_a_rehearsal_starts_what_has_crashed_but_not_what_its_fault_has_ended(
    slurm: Slurm, folder: Path
) -> None:
    sandbox = Sandbox(folder)
    sandbox.up(Settings(nodes=2, gpus=0, accounting=False))
    crashed, lost = (f"slurmd-{node}" for node in sandbox.nodes)
    said: list[str] = []
    run = RehearsedRun(sandbox, RunDir(folder / "run"), 60.0, said.append)
    run.stopped = lost
    for name in (lost, crashed):
        sandbox.stop_daemon(name, signal.SIGKILL)
    run.until(lambda: said, "a daemon that is started again", ends=True)
    assert sandbox.ended() == [lost] and crashed in said[0]
    node = crashed.removeprefix("slurmd-")
    wait_until(lambda: sandbox.status()["nodes"][node] == "idle", f"{crashed} is not back")


def test_a_rehearsal_gives_up_a_daemon_that_ends_at_each_start(slurm: Slurm, folder: Path) -> None:
    sandbox = Sandbox(folder)
    sandbox.up(QUIET)
    run = RehearsedRun(sandbox, RunDir(folder / "run"), 60.0, print)
    with Path(sandbox.status()["home"], "daemons.conf").open("a") as settings:
        settings.write("NoSuchThing=1\n")
    sandbox.stop_daemon(name := f"slurmd-{sandbox.nodes[0]}", signal.SIGKILL)
    with pytest.raises(SandboxError, match=rf"{name} ended again, after 3 starts") as error:
        run.until(lambda: False, "nothing", ends=True)
    assert "NoSuchThing" in str(error.value)


def test_status_for_programs(slurm: Slurm) -> None:
    done = hpcddp_sandbox("status", "--json", "--folder", str(slurm.sandbox.folder))
    assert json.loads(done.stdout) == slurm.sandbox.status()
