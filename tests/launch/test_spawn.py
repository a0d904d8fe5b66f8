import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import wait_for

from hpcddp import JOB_FORMAT, processes
from hpcddp.launch.children import WAIT, Group, patience
from hpcddp.topology import Topology

# The wait between TERM and KILL is shortened, all else is as the script starts it.
QUICK = """
import sys
from hpcddp.launch import children, spawn
children.KILL_WAIT = 0.3
sys.exit(spawn.main(sys.argv[1:]))
"""


AS_STARTED = ("-m", "hpcddp.launch.spawn")


def arguments(
    nodes: int, gpus: int, script: str, how: tuple[str, str] = ("-c", QUICK)
) -> list[str]:
    return [sys.executable, "-P", *how, str(nodes), str(gpus), "bash", "-c", script]


FOREVER = "while :; do sleep 0.05; done"
# The others are up, and their traps are set.
MEET = "if [ $RANK = 0 ]; then until [ -e up1 ] && [ -e up2 ]; do sleep 0.02; done; exit 7; fi"


def run(
    nodes: int,
    gpus: int,
    script: str,
    folder: Path | None = None,
    how: tuple[str, str] = ("-c", QUICK),
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments(nodes, gpus, script, how),
        capture_output=True, text=True, timeout=60, check=False, cwd=folder,
    )  # fmt: skip


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that are ended, with all they started, also when a test fails."""
    found: list[subprocess.Popen[str]] = []
    yield found
    for process in found:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def start(
    started: list[subprocess.Popen[str]],
    nodes: int,
    gpus: int,
    script: str,
    how: tuple[str, str] = ("-c", QUICK),
) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        arguments(nodes, gpus, script, how),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    started.append(process)
    return process


def read(process: subprocess.Popen[str], count: int) -> list[str]:
    assert process.stdout
    return sorted(process.stdout.readline() for _ in range(count))


def piped(script: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE)


def test_every_rank_has_its_place_and_its_label() -> None:
    done = run(2, 2, 'echo "$RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $GROUP_RANK"')
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == [
        "0: 0 4 0 2 0",
        "1: 1 4 1 2 0",
        "2: 2 4 0 2 1",
        "3: 3 4 1 2 1",
    ]


def test_labels_are_as_wide_as_the_last_rank() -> None:
    lines = run(1, 11, "echo x").stdout.splitlines()
    assert {" 0: x", "10: x"} < set(lines) and len(lines) == 11


def test_errors_go_the_same_way_and_order_is_kept() -> None:
    assert run(1, 1, "echo a; echo b >&2; echo c").stdout == "0: a\n0: b\n0: c\n"


def test_a_line_that_comes_in_parts_is_one_line() -> None:
    done = run(1, 2, 'printf "a$RANK"; sleep 0.2; printf "b\\nc$RANK"')
    assert sorted(done.stdout.splitlines()) == ["0: a0b", "0: c0", "1: a1b", "1: c1"]


def test_lines_longer_than_a_pipe_and_bytes_of_any_kind() -> None:
    done = subprocess.run(
        arguments(1, 1, r"printf '%0200000d\n\377\r\n\n' 7"), capture_output=True, check=True
    )
    long, raw, empty = done.stdout.removesuffix(b"\n").split(b"\n")
    assert (len(long), raw, empty) == (200_003, b"0: \xff\r", b"0: ")


def test_a_last_line_without_its_end_is_not_lost(tmp_path: Path) -> None:
    """Nor when its process ends before anybody has looked, and another one keeps the pipe open."""
    with (tmp_path / "out").open("wb") as out:
        group = Group(list(Topology(1, 1).ranks()), lambda rank: piped("sleep 60 & printf $!"), out)
        for process in group.processes.values():
            assert isinstance(process, subprocess.Popen)
            process.wait()
        try:
            assert group.run() == 0
        finally:
            text = (tmp_path / "out").read_text()
            os.kill(int(text.removeprefix("0: ")), signal.SIGKILL)
            for process in group.processes.values():
                assert process.stdout
                process.stdout.close()
            group.selector.close()
    assert text.endswith("\n")


def test_a_rank_that_stays_when_another_has_left_is_ended(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as out:
        words = {0: "exit 0", 1: "echo last; exec sleep 600"}
        ranks = list(Topology(1, 2).ranks())
        group = Group(ranks, lambda rank: piped(words[rank.world_rank]), out, wait=1)
        assert group.run() == 128 + signal.SIGTERM
        for process in group.processes.values():
            assert process.stdout
            process.stdout.close()
        group.selector.close()
    told = (tmp_path / "out").read_text()
    assert re.search(
        r"^hpcddp: rank 1 on \S+ still ran 1 s after another rank ended: ending it$", told, re.M
    )
    assert re.search(r"^hpcddp: rank 1 on \S+ was ended by SIGTERM$", told, re.M)


def test_ranks_of_a_program_may_stay(tmp_path: Path) -> None:
    def waits(command: list[str]) -> float:
        job = {"format": JOB_FORMAT, "spec": {"command": command}}
        (tmp_path / "job.json").write_text(json.dumps(job))
        return patience({"HPCDDP_RUN_DIR": str(tmp_path)})

    assert waits(["python", "train.py"]) == float("inf")
    assert waits([]) == patience({}) == WAIT


def test_the_first_bad_code_is_the_one_and_ends_the_others(tmp_path: Path) -> None:
    script = f"{MEET}; trap 'echo asked; exit 3' TERM; >up$RANK; {FOREVER}"
    done = run(1, 3, script, tmp_path, AS_STARTED)
    assert done.returncode == 7
    assert sorted(done.stdout.splitlines()) == ["1: asked", "2: asked"]


# A shell of each rank has a program, which says when it is up and when it was told.
INNER = """
import os, signal, sys, time
numbers, deaf = {signal.SIGTERM, signal.SIGUSR2}, len(sys.argv) > 1
if deaf:
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
else:  # to take one after the other: a handler may be interrupted by the next signal's
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
open(f"up-{os.environ['RANK']}-{os.getpid()}", "w").close()
if deaf:
    time.sleep(60)
open(f"told-{os.environ['RANK']}-{signal.sigwait(numbers)}", "w").close()
"""


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_what_a_shell_leaves_behind_is_told_too(
    started: list[subprocess.Popen[str]], tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "inner.py").write_text(INNER)
    script = f"cd {tmp_path}; {sys.executable} inner.py; echo over"
    process = start(started, 1, 2, script, AS_STARTED)
    wait_for(lambda: len(list(tmp_path.glob("up-*"))) == 2, "programs")
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert {path.name for path in tmp_path.glob("told-*")} >= {f"told-{r}-{number}" for r in (0, 1)}


def test_what_a_rank_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    (tmp_path / "inner.py").write_text(INNER)
    wait = "until ls up-* &>/dev/null; do sleep 0.02; done"
    done = run(1, 1, f"{sys.executable} inner.py deaf & {wait}; exit 7", tmp_path)
    assert done.returncode == 7
    (path,) = tmp_path.glob("up-*")
    wait_for(lambda: not processes.start_of(int(path.name.rpartition("-")[2])), "its end")


def test_a_rank_that_a_signal_ended_is_named() -> None:
    done = run(1, 2, "[ $RANK = 1 ] && kill -SEGV $$; exec sleep 60")
    assert done.returncode == 128 + signal.SIGSEGV
    assert f"hpcddp: rank 1 on {os.uname().nodename} was ended by SIGSEGV" in done.stdout


def test_a_killed_rank_is_named_where_another_is_seen_first(
    started: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    """The launcher stands still until both have left."""
    up = tmp_path / "up"
    script = (
        f"if [ $RANK = 0 ]; then until [ -e {up} ]; do sleep 0.02; done; exit 1; fi; "
        f"kill -STOP $PPID; >{up}; kill -KILL $$"
    )
    process = start(started, 1, 2, script)
    wait_for(up.exists, "the rank that is killed")
    wait_for(lambda: members(process.pid) == [process.pid], "the end of the ranks")
    process.send_signal(signal.SIGCONT)
    assert f"rank 1 on {os.uname().nodename} was ended by SIGKILL" in read(process, 1)[0]
    assert process.wait(30) == 128 + signal.SIGKILL


def test_a_rank_that_is_killed_while_the_others_are_ended_is_named(tmp_path: Path) -> None:
    script = f"{MEET}; trap 'kill -KILL $$' TERM; >up$RANK; {FOREVER}"
    done = run(1, 3, script, tmp_path, how=AS_STARTED)
    assert done.returncode == 7 and "rank 1 on " in done.stdout


def test_ranks_that_do_not_listen_are_killed_and_nothing_is_left(tmp_path: Path) -> None:
    done = run(1, 3, f"{MEET}; trap '' TERM; echo $$; >up$RANK; {FOREVER}", tmp_path)
    assert done.returncode == 7
    left = [int(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(left) == 2 and not any(processes.start_of(pid) for pid in left)
    assert "was ended by" not in done.stdout  # by nobody else


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_is_passed_on_and_waited_for(
    started: list[subprocess.Popen[str]], number: signal.Signals
) -> None:
    script = f"trap 'sleep 0.1; echo saved; exit 85' TERM; echo up; {FOREVER}"
    process = start(started, 2, 2, script, AS_STARTED)
    assert len(read(process, 4)) == 4
    process.send_signal(number)
    assert read(process, 4) == [f"{rank}: saved\n" for rank in range(4)]
    assert process.wait(30) == 85


def test_usr2_is_passed_on_and_ends_nothing(started: list[subprocess.Popen[str]]) -> None:
    process = start(started, 1, 2, f"trap 'echo told; exit 0' USR2; echo up; {FOREVER}")
    read(process, 2)
    process.send_signal(signal.SIGUSR2)
    assert read(process, 2) == ["0: told\n", "1: told\n"]
    assert process.wait(30) == 0


def test_a_rank_that_closes_its_output_is_still_waited_for() -> None:
    assert run(1, 1, "exec >&- 2>&-; sleep 0.2; exit 4").returncode == 4


def members(session: int) -> list[int]:
    """The processes of a session that have not ended."""
    found = []
    for pid in (int(path.name) for path in Path("/proc").glob("[0-9]*")):
        with contextlib.suppress(ProcessLookupError):
            found += [pid] if os.getsid(pid) == session and processes.start_of(pid) else []
    return found


# So few files may be open that the last ranks cannot be started.
CROWDED = """
import resource, sys
from hpcddp.launch import spawn
resource.setrlimit(resource.RLIMIT_NOFILE, (16, 16))
sys.exit(spawn.main(sys.argv[1:]))
"""


def test_a_rank_that_cannot_be_started_leaves_no_other_behind(
    started: list[subprocess.Popen[str]],
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", CROWDED, "1", "20", "sleep", "600"],
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    started.append(process)
    assert process.stderr
    # The ranks write to pipes of their own: this ends with the launcher alone.
    assert "Too many open files" in process.stderr.read()
    assert process.wait(30) != 0
    wait_for(lambda: not members(process.pid), "the end of the ranks")


def test_a_command_that_is_not_there_starts_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "hpcddp.launch.spawn", "1", "2", "no-such-command"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert "no-such-command" in done.stderr


def test_a_full_disk_loses_lines_and_no_rank() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            arguments(1, 2, "echo said; exit 0"), stdout=full, timeout=60, check=False
        )
    assert done.returncode == 0
