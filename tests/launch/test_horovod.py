"""The launcher horovod, on this machine: with stand-ins for Horovod, in the long tests itself."""

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version

import pytest
from horovod_script import ASK, MEET, RESULT, gone, same, script
from local_runs import Command, end_all, until
from sites import Site

from hpcddp.attempt import ledger
from hpcddp.errors import UserError
from hpcddp.launch import horovod
from hpcddp.planning.jobfile import Layer
from hpcddp.rundir import RunDir
from hpcddp.topology import Topology


def pretend(site: Site, built: str = "") -> None:
    """A package horovod, as far as one can see without importing it."""
    site.write("horovod/__init__.py", "raise ImportError('it was imported')")
    if built:
        site.write("horovod/metadata.json", json.dumps({"pytorch": built, "dummy": "none"}))


def test_a_rank_is_told_who_it_is() -> None:
    rank = Topology(2, 3).rank_of(4)
    found = horovod.environment(rank, {"GLOO_SOCKET_IFNAME": "ib0"})
    neighbour = horovod.environment(Topology(2, 3).rank_of(2), {})
    assert found.pop("HOROVOD_HOSTNAME") != neighbour["HOROVOD_HOSTNAME"]
    assert found == {
        "HOROVOD_RANK": "4", "HOROVOD_SIZE": "6", "HOROVOD_LOCAL_RANK": "1",
        "HOROVOD_LOCAL_SIZE": "3", "HOROVOD_CROSS_RANK": "1", "HOROVOD_CROSS_SIZE": "2",
        "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": "ib0", "HOROVOD_GLOO_TIMEOUT_SECONDS": "600",
    }  # fmt: skip
    mine = {"HOROVOD_GLOO_IFACE": "eth1", "HOROVOD_GLOO_TIMEOUT_SECONDS": "9"}
    assert mine.items() <= horovod.environment(rank, mine).items()


def planned(site: Site, *words: str) -> str:
    flags = Layer()
    flags.put("launcher", "horovod", "--launcher")
    if words:
        flags.put("command", list(words), "command line")
    return site.plan(flags, job=None if words else "toy").launcher.name


@pytest.mark.parametrize("built", ["", version("torch")])
def test_a_horovod_that_is_there_is_taken(site: Site, built: str) -> None:
    pretend(site, built)
    assert planned(site, sys.executable, "-V") == "horovod"


def test_what_only_the_nodes_can_tell_is_not_asked(site: Site) -> None:
    assert planned(site, "bash", "-c", "python train.py") == "horovod"


@pytest.mark.parametrize(
    ("built", "what"),
    [
        ("", f"horovod is not installed in {sys.executable}"),
        ("1.13.1+cu117", "built for torch 1.13.1"),
    ],
)
def test_a_horovod_that_is_not_there_is_told(site: Site, built: str, what: str) -> None:
    if built:
        pretend(site, built)
    with pytest.raises(UserError, match=re.escape(what)) as caught:
        planned(site, sys.executable, "-V")
    assert "Move from Horovod to DDP" in caught.value.hint


def test_a_task_does_not_use_it(site: Site) -> None:
    with pytest.raises(UserError, match="given after --"):
        planned(site)


@pytest.fixture
def stored() -> Iterator[list[subprocess.Popen[str]]]:
    found: list[subprocess.Popen[str]] = []
    yield found
    for process in found:
        process.kill()
        process.communicate()


def start(stored: list[subprocess.Popen[str]], program: str) -> subprocess.Popen[str]:
    """A store beside a program of Python's."""
    words = [
        sys.executable,
        "-P",
        "-m",
        "hpcddp.launch.horovod_rendezvous",
        sys.executable,
        "-c",
        ASK + program,
    ]
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, env={"MASTER_ADDR": "127.0.0.1"}
    )
    stored.append(process)
    return process


def test_the_store_keeps_a_value_until_it_is_taken_back(
    stored: list[subprocess.Popen[str]],
) -> None:
    value = "bytes(range(256)) * 1000"
    process = start(stored, f"""
assert ask("GET", "0") == (404, b"")
assert ask("PUT", "0", {value}) == ask("PUT", "1", b"") == (200, b"")
assert ask("GET", "0") == (200, {value}) and ask("GET", "1") == (200, b"")
assert ask("DELETE", "0") == ask("DELETE", "2") == (200, b"")
assert ask("GET", "0") == (404, b"")
print(address[1])
sys.exit(7)
""")  # fmt: skip
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 7
    gone(int(out))


def test_the_store_ends_with_a_launcher_that_is_killed(
    stored: list[subprocess.Popen[str]],
) -> None:
    process = start(stored, "print(address[1], flush=True)\nsys.stdin.read()\nimport time\n"
                            "time.sleep(60)")  # fmt: skip
    assert process.stdout
    port = int(process.stdout.readline())
    with socket.create_connection(("127.0.0.1", port), timeout=60):
        process.send_signal(signal.SIGKILL)
    gone(port)


def test_a_launcher_that_is_not_there_is_told(stored: list[subprocess.Popen[str]]) -> None:
    words = [sys.executable, "-P", "-m", "hpcddp.launch.horovod_rendezvous", "no-such-program"]
    done = subprocess.run(
        words, env={"MASTER_ADDR": "x"}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    what = "cannot start no-such-program: No such file or directory"
    assert f"hpcddp: command: {what}\n  is it installed on the nodes" in done.stderr


SUBMIT = ("submit", "--no-snapshot", "--launcher", "horovod", "--nodes", "2", "--gpus", "2")


@pytest.fixture
def ending(site: Site) -> Iterator[Site]:
    """A user's folder whose runs do not outlive a test, however that ends."""
    yield site
    end_all(site)


def test_ranks_meet_and_a_rank_that_fails_ends_all(ending: Site, command: Command) -> None:
    pretend(ending)
    ending.write("train.py", MEET)
    keys = ("--set", "requeue.crashes=1", "--set", "start_seconds=0.01")  # no process group: well
    assert command(*SUBMIT, *keys, "--", sys.executable, "train.py", "fail").code == 1
    (path,) = ending.runs.iterdir()
    assert [(a.cause, a.exit_code) for a in ledger.attempts(RunDir(path))] == [("crash", 3)]
    told = [json.loads((ending.folder / f"told-{rank}").read_text()) for rank in range(4)]
    assert [row["RANK"] for row in told] == ["0", "1", "2", "3"]
    assert len({row["HOROVOD_HOSTNAME"] for row in told}) == 2
    gone(int(told[0]["HOROVOD_GLOO_RENDEZVOUS_PORT"]))


def test_cancel_ends_the_ranks_and_the_store(ending: Site, command: Command) -> None:
    pretend(ending)
    ending.write("train.py", MEET)
    command(*SUBMIT, "--detach", "--", sys.executable, "train.py")
    until(command, lambda s: len(list(ending.folder.glob("told-*"))) == 4)
    command("cancel", "last")
    until(command, lambda s: s["state"] == "CANCELLED")
    port = json.loads((ending.folder / "told-0").read_text())["HOROVOD_GLOO_RENDEZVOUS_PORT"]
    gone(int(port))


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_horovod_and_ddp_print_the_same_digits(
    ending: Site, command: Command, built_horovod: str
) -> None:
    found = []
    for mark, launcher in (("-", "horovod"), ("+", "spawn")):
        ending.write("train.py", script(mark))
        given = ("--launcher", launcher, "--env", f"PYTHONPATH={built_horovod}")
        done = command("submit", "--gpus", "2", *given, "--", sys.executable, "train.py")
        assert done.code == 0, done.text
        found += RESULT.findall(done.text)
    same(found)
