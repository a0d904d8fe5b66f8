"""Time from a fault to the next new step: in place, beside a requeue of the same job.

On a real Slurm on this machine: 2 nodes x 2 ranks, 1 spare node, steps of 0.05 s. A measurement
starts with the fault, and ends with the first step that the run had not taken before. The floor is
the same job with ``requeue.here = false`` and a killed rank. Where the node of the batch script
fails, a second row starts at the moment in which Slurm has that node down.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from benchmarks.measure import Row
from benchmarks.site import HPCDDP, Site, output
from hpcddp.errors import HpcddpError
from hpcddp.rundir import RunDir, read_step
from hpcddp.sandbox import daemons, faults
from hpcddp.sandbox.cluster import Sandbox
from hpcddp.sandbox.fault_times import Fault
from hpcddp.sandbox.rehearsal_sandbox import HANG_SECONDS, own_sandbox
from hpcddp.sandbox.rehearsed_run import RehearsedRun
from hpcddp.sandbox.state import load

TASK = Path(__file__).with_name("heavy.py")
NODES, RANKS, SPARES = 2, 2, 1
FROM = 30  # the step from which the fault may come
LOOK = 0.01  # seconds between two looks
PATIENCE = 400.0  # seconds
HEARTBEAT = 10.0  # seconds of silence after which a node is lost
# Kind of fault -> the row's name, and its limit in seconds.
KINDS = {
    "crash": ("recover, killed rank", 3.0),
    "kill-node": ("recover, killed node", 5.0),
    "silent-node": ("recover, silent node", HEARTBEAT + 5.0),
    "hang": ("recover, hang", HANG_SECONDS + 8.0),
    "kill-script": ("recover, killed script", 30.0),
    "kill-head": ("recover, killed host", None),
}
DOWN = ("recover, after its node is down", 30.0)


def rows(site: Site) -> Iterator[Row]:
    with own_sandbox(NODES + SPARES + 1, RANKS, late=False) as sandbox:
        bench = _Bench(site, sandbox)
        floor = bench.take("crash", "requeue.here=false")
        for kind, (name, limit) in KINDS.items():
            hangs = [f"train.hang_seconds={HANG_SECONDS}"] if kind == "hang" else []
            ours = bench.take(kind, "--spares", str(SPARES), *hangs)
            yield Row(name, ours, floor, limit=limit, twice=limit is not None)
            if kind == "kill-head":
                yield Row(DOWN[0], bench.after_down, floor, limit=DOWN[1], twice=True)


class _Bench:
    """The measurements on one sandbox.

    ``after_down`` has the seconds from the moment at which Slurm has a node down.
    """

    def __init__(self, site: Site, sandbox: Sandbox) -> None:
        self.site, self.sandbox = site, sandbox
        self.after_down: list[float] = []

    def take(self, kind: str, *how: str) -> list[float]:
        """The seconds of each of some faults of a kind.

        Args:
            how: options of `hpcddp submit`, or keys of the job.
        """
        words = [w for word in how for w in (["--set", word] if "=" in word else [word])]
        taken = []
        for number in range(self.site.pairs):
            _say(f"{kind} {number + 1} of {self.site.pairs}")
            taken.append(self._fault(kind, number / self.site.pairs, words))
        return taken

    def _fault(self, kind: str, aim: float, words: list[str]) -> float:
        run = RehearsedRun(self.sandbox, self._submit(words), PATIENCE, _say)
        run.until(lambda: run.look()[1] >= FROM, "the first steps")
        fault = Fault(kind, FROM, 0.0, aim, attempt=1)
        host = run.facts().host
        new = _Moment(lambda: _new_step(run.folder))
        down = _Moment(lambda: time.time() if self._is_down(host) else 0.0, every=0.5)
        began = time.time()
        faults.PLAY[kind](run, fault, 0.0)
        seconds = new.wait() - began
        if kind == "kill-head":
            self.after_down.append(new.wait() - down.wait())
        down.stop()
        output([HPCDDP, "cancel", str(run.folder.path)], os.environ, self.site.folder)
        run.until(lambda: not run.tasks(), "the end of the job", ends=True)
        return seconds

    def _submit(self, words: list[str]) -> RunDir:
        folder = self.site.fresh()
        (folder / "jobs").mkdir()
        (folder / "jobs/heavy.py").write_text(TASK.read_text())
        (folder / "jobs/heavy.toml").write_text("global_batch = 4\nmax_steps = 100000\n")
        profile = str(self.sandbox.folder.parent / "rehearsal.toml")
        keys = {"dataset.pause": "0.05"}
        command = [HPCDDP, "submit", "heavy", "--nodes", str(NODES), "--gpus", str(RANKS),
                   "--cluster", profile, "--partition", "low", "--detach", "--json"]  # fmt: skip
        sets = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
        # What this fault did to a node must not keep the next job off it.
        environ = os.environ | {"XDG_CONFIG_HOME": str(folder / "config")}
        return RunDir(json.loads(output([*command, *sets, *words], environ, folder))["path"])

    def _is_down(self, host: str) -> bool:
        state = load(self.sandbox.folder)
        return state is not None and "down" in daemons.node_states(state)[host]


def _say(line: str) -> None:
    print(f"recover: {line}", file=sys.stderr)


def _new_step(run: RunDir) -> float:
    """The time of a step that the first attempt had not taken; 0 before."""
    first, *later = run.all_attempts()
    last = read_step(first)[0]
    return max((when for step, when in map(read_step, later) if step > last), default=0.0)


class _Moment:
    """Waits in a thread for a function to return a time.

    Args:
        every: seconds between two calls.
    """

    def __init__(self, look: Callable[[], float], every: float = LOOK) -> None:
        self._look, self._every, self._when = look, every, 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._when and not self._over.wait(self._every):
            with suppress(HpcddpError, OSError):
                self._when = self._look()

    def stop(self) -> None:
        """Stop waiting."""
        self._over.set()
        self._thread.join()

    def wait(self) -> float:
        """The time, in seconds since the epoch.

        Raises:
            HpcddpError: it did not come.
        """
        self._thread.join(PATIENCE)
        if not self._when:
            self.stop()
            raise HpcddpError(f"no new step came within {PATIENCE:.0f} s")
        return self._when
