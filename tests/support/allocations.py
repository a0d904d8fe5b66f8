"""The place of a batch script, with parents of ranks that outlive attempts, and their supervisor:
real processes, with plain_srun.py in place of srun."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

from lives import attempted
from ranks import wait_for
from sites import record_run

from hpcddp import processes
from hpcddp.attempt.link import channel
from hpcddp.rundir import RunDir

SRUN = Path(__file__).with_name("plain_srun.py")
# A script whose ranks tell who they are, and then do what their file says.
RANK = """
import json, os, pathlib, signal, subprocess, sys, time
from hpcddp.attempt.link import slots
me = os.environ["RANK"]
pathlib.Path(f"up-{os.environ['HPCDDP_ATTEMPT']}-{me}").write_text(json.dumps({
    "pid": os.getpid(), "parent": os.getppid(), "torch": "torch" in sys.modules,
    "world": os.environ["WORLD_SIZE"], "port": os.environ["MASTER_PORT"],
    "address": os.environ["MASTER_ADDR"], "node": os.environ.get("SLURM_NODEID", ""),
    "handlers": [str(signal.getsignal(n)) for n in (signal.SIGTERM, signal.SIGUSR2)],
    "secret": "HPCDDP_SECRET" in os.environ,
}))
if pathlib.Path("leaves").exists():
    subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 7654 & wait"])
print(f"rank {me} is up")
def saved(number, frame):
    while pathlib.Path("slow").exists():
        time.sleep(0.01)
    print(f"rank {me} saves")
    sys.exit(85)
signal.signal(signal.SIGUSR2, saved)
if pathlib.Path("slow").exists():
    signal.signal(signal.SIGTERM, saved)
slot, steps = slots.own_slot(os.environ), 0
while not (todo := pathlib.Path(f"do-{me}")).exists():
    time.sleep(0.01)
    steps += 1
    slot.count(steps)
print(f"rank {me} ends")
sys.exit(int(todo.read_text()))
"""


class Allocation:
    """The place of a batch script: a process that stands for it, and the attempts in it."""

    def __init__(
        self, folder: Path, size: int = 2, heartbeat: float = 60.0, kill_wait: float = 0.0
    ) -> None:
        spec = {"requeue": {"heartbeat_seconds": heartbeat}}
        self.size, self.kill_wait = size, kill_wait
        self.run = record_run(RunDir(folder), (size, size), 2, "slurm", spec=spec)
        self.script = subprocess.Popen(["sleep", "1000"])
        self.door = channel.door_of(self.script.pid)
        self.attempts = 0
        self.going: list[subprocess.Popen[bytes]] = []
        folder.joinpath("train.py").write_text(textwrap.dedent(RANK))

    def start(self, nodes: int = 2, ranks: int = 2) -> subprocess.Popen[bytes]:
        """Start an attempt."""
        self.attempts += 1
        if self.kill_wait:
            attempted(self.run, self.attempts, site={"kill_wait": self.kill_wait})
        self.run.attempt(self.attempts).path.mkdir(parents=True, exist_ok=True)
        for path in self.run.path.glob("do-*"):
            path.unlink()
        python = [sys.executable, "-P", "-m"]
        parent = [*python, "hpcddp.launch.parent", str(ranks), sys.executable, "train.py"]
        srun = [sys.executable, "-P", str(SRUN), f"--nodes={nodes}", *parent]
        how = [str(self.attempts), str(self.script.pid), str(nodes)]
        words = [*python, "hpcddp.attempt.host", "ranks", str(self.run.path), *how, *srun]
        environ = {
            **os.environ, "HPCDDP_RUN_DIR": str(self.run.path), "MASTER_ADDR": "127.0.0.1",
            "HPCDDP_ATTEMPT": str(self.attempts), "MASTER_PORT": str(1000 + self.attempts),
        }  # fmt: skip
        with open(self.log, "ab") as log:
            self.going.append(
                subprocess.Popen(words, cwd=self.run.path, env=environ, stdout=log, stderr=log)
            )
        return self.going[-1]

    @property
    def log(self) -> Path:
        return self.run.attempt(self.attempts).log

    def up(self, count: int) -> list[dict[str, object]]:
        """What the ranks of the attempt tell, once so many are there."""
        pattern = f"up-{self.attempts}-*"

        def told() -> list[dict[str, object]]:
            texts = [path.read_text() for path in sorted(self.run.path.glob(pattern))]
            return [json.loads(text) for text in texts if text]

        wait_for(lambda: len(told()) == count, f"{count} ranks")
        return told()

    def let(self, rank: int, code: int | str) -> None:
        """Let a rank exit; it fails if the code is no number."""
        new = self.run.path / f"new-{rank}"
        new.write_text(str(code))
        new.rename(self.run.path / f"do-{rank}")

    @property
    def reached(self) -> bool:
        """Whether there is a supervisor."""
        try:
            channel.connect_here(self.door).close()
        except OSError:
            return False
        return True

    @property
    def supervisor(self) -> int:
        """The process id of the supervisor, which the first attempt has started."""
        (pid,) = processes.children(self.going[0].pid)
        return pid

    def end(self) -> None:
        for process in self.going:
            process.kill()
            process.wait()
        self.script.kill()
        self.script.wait()


def alive(told: list[dict[str, object]], name: str = "pid") -> set[int]:
    pids = {int(str(rank[name])) for rank in told}
    return {pid for pid in pids if processes.start_of(pid)}
