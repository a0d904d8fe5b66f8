"""Ranks that are forked from one process of their node, beside ranks that are started alone."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from local_runs import Command, toy, until
from sites import Outcome, Site

from hpcddp import processes
from hpcddp.attempt import ledger
from hpcddp.errors import UserError
from hpcddp.launch.fork import Forked
from hpcddp.launch.script import Script
from hpcddp.rundir import RunDir
from hpcddp.topology import Rank

__all__ = ["toy"]

# What a script can see of its process.
LOOK = """
import json, os, random, signal, sys, threading
import numpy
class Mine: pass
found = {
    "arguments": sys.argv, "folder": os.getcwd(), "path": sys.path[0], "name": __name__,
    "file": __file__, "module": Mine.__module__,
    "main": sys.modules["__main__"].__dict__ is globals(),
    "files": sorted(
        int(f) for f in os.listdir("/proc/self/fd")
        if "memfd:hpcddp-" not in os.path.realpath(f"/proc/self/fd/{f}")
    )[:-1],
    "signals": [str(signal.getsignal(n)) for n in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)],
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "threads": threading.active_count(),
    "input": os.read(0, 1).decode(),
    "ranks": {n: v for n, v in os.environ.items() if "RANK" in n or "WORLD" in n},
}
found["random"] = [random.random(), numpy.random.rand()]
open(f"seen-{os.environ['RANK']}", "w").write(json.dumps(found))
"""

# A process that gets TERM while its Python leaves, after its handlers were taken away.
LATE = """
import os, signal, sys
class Late:
    def __del__(self, kill=os.kill, mine=os.getpid(), pid=os.getpid, number=signal.SIGTERM):
        if pid() == mine:
            kill(mine, number)
if f"hpcddp.{os.environ['LATE']}" in sys.orig_argv:
    sys.late = Late()
"""


def submit(command: Command, launcher: str, *words: str, gpus: str = "2") -> Outcome:
    size = ("--nodes", "2", "--gpus", gpus)
    how = ("--launcher", launcher, "--no-snapshot", "--set", "requeue.crashes=1")
    return command("submit", *size, *how, "--", sys.executable, *words)


def seen(site: Site) -> list[dict[str, object]]:
    return [json.loads((site.folder / f"seen-{rank}").read_text()) for rank in range(4)]


def test_a_script_sees_what_it_would_see_alone(site: Site, command: Command) -> None:
    site.write("sub/train.py", LOOK)
    assert submit(command, "spawn", "sub/train.py", "a b", "$HOME").code == 0
    alone = seen(site)
    assert submit(command, "fork", "sub/train.py", "a b", "$HOME").code == 0
    forked = seen(site)
    drawn = [str(rank.pop("random")) for found in (alone, forked) for rank in found]
    assert forked == alone
    assert len(set(drawn)) == len(drawn)


def test_torch_is_imported_once_a_node(site: Site, command: Command) -> None:
    site.write("train.py", "import os, sys; print(os.getppid(), 'torch' in sys.modules)")
    done = submit(command, "fork", "train.py")
    parents = [line.split()[1:] for line in done.text.splitlines() if line[1:3] == ": "]
    assert len(parents) == 4 and {loaded for _, loaded in parents} == {"True"}
    assert len({parent for parent, _ in parents}) == 2


def test_a_gpu_that_an_import_has_opened_is_never_forked(site: Site) -> None:
    site.write("look.py", "import os, sys\nprint('torch' in sys.modules, os.environ['LOCAL_RANK'])")
    program = """
        import sys
        from hpcddp.launch import fork
        fork.GPUS = ("/dev/zero",)
        device = open("/dev/zero")
        sys.exit(fork.main(["2", sys.executable, "look.py"]))
    """
    here = Rank(0, 1, 0, 1, 0).to_env() | {"HPCDDP_RUN_DIR": str(site.folder)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=site.folder,
        env={**os.environ, **here}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    told, *lines = done.stdout.splitlines()
    assert "opened /dev/zero" in told
    assert sorted(lines) == ["0: False 0", "1: False 1"]


@pytest.mark.parametrize(
    ("launcher", "module"), [("spawn", "spawn"), ("fork", "fork"), ("torchrun", "agent")]
)
def test_a_signal_while_a_launcher_leaves_hides_no_exit_code(
    site: Site, command: Command, launcher: str, module: str
) -> None:
    site.write("sitecustomize.py", LATE)
    site.write("train.py", "import sys; sys.exit(7)")
    late = ("--env", f"PYTHONPATH={site.folder}", "--env", f"LATE={module}")
    size = ("--nodes", "1", "--gpus", "2", "--launcher", launcher, "--no-snapshot")
    words = (*late, "--set", "requeue.crashes=1", "--", sys.executable, "train.py")
    assert command("submit", *size, *words).code == 1
    (only,) = ledger.attempts(RunDir(next(site.folder.glob("runs/train-*"))))
    assert only.exit_code == 7


def test_the_built_in_worker_ends_with_the_same_weights(toy: Site, command: Command) -> None:
    for launcher in ("spawn", "fork"):
        done = command("submit", "--nodes", "2", "--gpus", "2", "--launcher", launcher)
        assert done.code == 0, done.text
        assert "2: rank 2(4), node 1(2), local 0(2)" in command("logs").out
        assert command("export", "last", f"{launcher}.pt").code == 0
    forked, alone = (torch.load(toy.folder / f"{name}.pt") for name in ("fork", "spawn"))
    assert all(torch.equal(forked[name], alone[name]) for name in alone | forked)


@pytest.mark.parametrize(
    ("text", "code", "told"),
    [
        ("import sys, atexit; atexit.register(print, 'bye'); sys.exit(3)", 3, "bye"),
        ("raise ValueError('no')", 1, "line 1, in <module>"),
        ("import os; os.kill(os.getpid(), 9)", 137, "was ended by SIGKILL"),
    ],
)
def test_it_ends_as_it_would_alone(
    site: Site, command: Command, text: str, code: int, told: str
) -> None:
    site.write("train.py", text)
    done = submit(command, "fork", "train.py")
    assert done.code == 1 and told in done.text
    assert "hpcddp/launch/script.py" not in done.text
    (path,) = site.runs.iterdir()
    assert [a.exit_code for a in ledger.attempts(RunDir(path))] == [code]


@pytest.mark.full
def test_a_stop_signal_reaches_each_rank(site: Site, command: Command) -> None:
    text = """
        import os, signal, sys, time
        def save(number, frame):
            open("saved-" + os.environ["RANK"], "w").close()
            sys.exit(0)
        signal.signal(signal.SIGUSR2, save)
        open("up-" + os.environ["RANK"], "w").close()
        time.sleep(60)
    """
    site.write("train.py", "\n".join(line[8:] for line in text.splitlines()))
    words = ("--", sys.executable, "train.py")
    command(
        "submit",
        "--nodes",
        "2",
        "--gpus",
        "2",
        "--launcher",
        "fork",
        "--no-snapshot",
        "--detach",
        *words,
    )
    until(command, lambda s: len(list(site.folder.glob("up-*"))) == 4)
    assert command("stop", "last").code == 0
    until(command, lambda s: s["state"] == "STOPPED")
    assert len(list(site.folder.glob("saved-*"))) == 4


def test_ranks_do_not_outlive_the_process_they_come_from(site: Site, command: Command) -> None:
    site.write("train.py", "import os, time\nopen(f'up-{os.getpid()}', 'w')\ntime.sleep(60)")
    words = ("--set", "requeue.crashes=1", "--", sys.executable, "train.py")
    command("submit", "--gpus", "2", "--launcher", "fork", "--no-snapshot", "--detach", *words)
    until(command, lambda s: len(list(site.folder.glob("up-*"))) == 2)
    ranks = [int(path.name[3:]) for path in site.folder.glob("up-*")]
    parent = int(Path(f"/proc/{ranks[0]}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(parent, signal.SIGKILL)
    until(command, lambda s: s["state"] == "FAILED")
    assert not any(processes.start_of(pid) for pid in ranks)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("bash", "train.sh"), "fork requires `python SCRIPT`"),
        ((sys.executable, "-c", "pass"), "fork requires `python SCRIPT`"),
        ((sys.executable, "-O", "train.py"), "fork requires `python SCRIPT`"),
        (("/usr/bin/python3", "train.py"), "the Python of hpcddp"),
    ],
)
def test_what_cannot_be_forked_is_refused(
    site: Site, command: Command, words: tuple[str, ...], told: str
) -> None:
    site.write("train.py", "")
    done = command("submit", "--launcher", "fork", "--", *words)
    assert done.code == 2 and told in done.err and not site.runs.exists()


def test_words_of_python_are_read_as_python_reads_them() -> None:
    found = Script(["python3.11", "-u", "-P", "-m", "pkg.train", "-m", "x"])
    assert (found.flags, found.module, found.name) == (["-u", "-P"], True, "pkg.train")
    assert found.arguments == ["-m", "x"]
    behind = Script(["/usr/bin/env", "A=1", "B=x=y", "python", "train.py"])
    assert (behind.environ, behind.python) == ({"A": "1", "B": "x=y"}, "python")
    for nothing in (["python"], ["env", "A=1"]):
        with pytest.raises(UserError):
            Script(nothing)


def test_what_is_read_when_a_python_starts_cannot_be_given_to_a_fork() -> None:
    with pytest.raises(UserError, match="PYTHONPATH has no effect") as caught:
        Script(["env", "A=1", "PYTHONPATH=src", "python", "train.py"])
    assert "--env PYTHONPATH=" in caught.value.hint


def test_a_rank_that_a_handler_has_seen_leave_is_no_error() -> None:
    pid = os.spawnlp(os.P_NOWAIT, "true", "true")
    rank = Forked(pid, os.open(os.devnull, os.O_RDONLY))
    os.waitpid(pid, 0)
    assert rank.poll() is None
    assert rank.stdout
    rank.stdout.close()
