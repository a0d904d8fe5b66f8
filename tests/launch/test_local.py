"""Whole runs on this machine, without a scheduler: the same commands, the same run dir."""

import json
import os
import pty
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from local_runs import Command, alive, status, until
from local_runs import toy as toy
from sites import COMMAND, Site
from toy import TOY

LONG = ("--set", "max_steps=100000", "--set", "dataset.pause=0.01")


def test_two_virtual_nodes_train_here(toy: Site, command: Command) -> None:
    done = command("submit", "--nodes", "2", "--gpus", "2")
    assert done.code == 0, done.text
    assert "gloo on CPU, 4 ranks" in done.out
    assert "held-out samples, seed 0)" in done.out
    found = status(command)
    assert (found["state"], found["backend"], found["step"]) == ("COMPLETED", "local", 12)
    lines = command("logs", "--rank", "3").out.splitlines()
    assert lines and all(line.startswith("3: rank 3(4), node 1(2), local 1(2)") for line in lines)
    told = json.loads(Path(found["path"], "versions.json").read_text())
    assert told["packages"]["torch"] == version("torch")
    assert told["python"] == ".".join(map(str, sys.version_info[:3]))


def test_detach_stop_resume_and_cancel(toy: Site, command: Command) -> None:
    first = json.loads(command("submit", "--gpus", "2", "--detach", "--json", *LONG).out)
    until(command, lambda s: s["state"] == "RUNNING" and s["step"] > 0)
    assert command("resume", first["run"]).code == 2
    assert command("stop", "last").code == 0
    stopped = until(command, lambda s: s["state"] == "STOPPED")
    more = f"max_steps={stopped['step'] + 3}"
    assert command("resume", "last", "--gpus", "1", "--set", more, "--follow").code == 0
    ended = status(command)
    assert (ended["state"], ended["step"]) == ("COMPLETED", stopped["step"] + 3)
    assert (ended["attempt"], ended["run"], ended["gpus_per_node"]) == (2, first["run"], 1)

    command("submit", "--gpus", "2", "--detach", *LONG)
    until(command, lambda s: s["state"] == "RUNNING" and s["step"] > 0)
    assert command("cancel", "last").code == 0
    until(command, lambda s: s["state"] == "CANCELLED")


class Terminal:
    """The command on a terminal of its own."""

    def __init__(self, *args: str) -> None:
        self.main, other = pty.openpty()
        self.process = subprocess.Popen(
            [COMMAND, *args], stdin=other, stdout=other, stderr=other, start_new_session=True,
            preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(other)
        self.seen = ""

    def until(self, text: str) -> None:
        """Read until a text has come."""
        while text not in self.seen:
            self.seen += os.read(self.main, 4096).decode("utf-8", "replace")

    def press(self, key: bytes) -> None:
        os.write(self.main, key)

    def end(self) -> int:
        """Read to the end; the exit code."""
        try:
            while data := os.read(self.main, 4096):
                self.seen += data.decode("utf-8", "replace")
        except OSError:  # Linux says the end of a terminal with EIO
            pass
        os.close(self.main)
        return self.process.wait(30)


def test_ctrl_c_saves_and_stops(toy: Site, command: Command) -> None:
    terminal = Terminal("submit", "--gpus", "2", *LONG)
    terminal.until("step 1 ")
    terminal.press(b"\x03")
    assert terminal.end() == 130
    assert "saving a checkpoint and stopping" in terminal.seen
    found = status(command)
    assert found["state"] == "STOPPED"
    assert (Path(found["path"]) / f"checkpoints/step-{found['step']}/COMPLETE").exists()


def test_second_ctrl_c_kills(toy: Site, command: Command) -> None:
    terminal = Terminal("submit", *LONG, "--set", "dataset.pause=5")
    terminal.until("gloo on CPU")
    terminal.press(b"\x03")
    terminal.until("press Ctrl-C again to kill")
    terminal.press(b"\x03")
    assert terminal.end() == 130
    assert status(command)["state"] == "CANCELLED"
    assert not alive(status(command)["job_id"])


def test_a_resume_of_another_model_leaves_the_run_as_it_was(toy: Site, command: Command) -> None:
    """Where the model cannot be made before the job, its first attempt finds it out."""
    task = TOY.replace("model()", "model(width=2)").replace(
        "nn.Linear(4, 2)", "nn.Linear(4, width)"
    )
    needs = "import os\nif 'RANK' not in os.environ: raise RuntimeError('no GPU')\n"
    toy.job("toy", "global_batch = 8\nmax_steps = 6\n", needs + task)
    assert command("submit").code == 0
    done = command("resume", "last", "--set", "model.width=16", "--set", "max_steps=9")
    assert done.code == 1, done.text
    assert "could not be compared with the checkpoint here (RuntimeError: no GPU)" in done.err
    found = status(command)
    assert (found["state"], found["step"], found["attempt"]) == ("COMPLETED", 6, 2)
    assert "model.weight is [2, 4] in the checkpoint and [16, 4] in the model" in found["reason"]
    why = command("why").out
    assert "refused" in why and "or submit a new run" in why
    assert command("resume", "last", "--set", "max_steps=9").code == 0
    assert status(command)["step"] == 9


def test_one_process_for_a_debugger(toy: Site, command: Command) -> None:
    toy.job("toy", "global_batch = 8\n", TOY + "\nimport os\nprint('task in', os.getpid())\n")
    done = command("run", "toy", "--steps", "5")
    assert done.code == 0, done.text
    found = status(command)
    assert (found["state"], found["step"]) == ("COMPLETED", 5)
    attempt = json.loads((Path(found["path"]) / "attempts/1/attempt.json").read_text())
    assert f"task in {attempt['pid']}" in done.out


def test_a_failure_is_told_once_and_named(toy: Site, command: Command) -> None:
    fails = "\nimport os\nif os.environ['RANK'] == '1': raise ValueError('rank one')\n"
    toy.job("toy", "global_batch = 8\nrequeue.crashes = 1\n", TOY + fails)
    done = command("submit", "--gpus", "2")
    assert done.code == 1
    assert done.out.count("Traceback") == 1
    assert "ValueError: rank one" in done.err and "rank 1" in done.err
    assert status(command)["state"] == "FAILED"
