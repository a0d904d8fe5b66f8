"""Attempts of a run under parents of ranks and their supervisor, in the place of a batch script."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import ports
import torch
from sites import SUPPORT

from hpcddp.attempt.link import channel
from hpcddp.rundir import RunDir


class Place:
    """A batch script's place, and attempts of a run in it."""

    def __init__(self, run: RunDir) -> None:
        self.run, self.number = run, 0
        self.outlives = False  # the step of the parents outlives the supervisor, as with --no-kill
        self.script = subprocess.Popen(["sleep", "1000"])
        self.door = channel.door_of(self.script.pid)
        self.ports: list[socket.socket] = []  # one for each attempt

    def start(self, nodes: int = 2, ranks: int = 2) -> subprocess.Popen[bytes]:
        """Start an attempt.

        Args:
            ranks: of each node.
        """
        self.number += 1
        self.ports.append(ports.held())
        self.run.attempt(self.number).path.mkdir(parents=True)
        python = [sys.executable, "-P", "-m"]
        command = [*python, "hpcddp.worker", str(self.run.path)]
        parent = [*python, "hpcddp.launch.parent", str(ranks), *command]
        srun = [*python, "hpcddp.launch.spawn", "--no-label", str(nodes), "1", *parent]
        if self.outlives:
            srun = [
                sys.executable,
                "-P",
                str(SUPPORT / "plain_srun.py"),
                f"--nodes={nodes}",
                *parent,
            ]
        how = [str(self.run.path), str(self.number), str(self.script.pid), str(nodes)]
        environ = {
            **os.environ, "HPCDDP_RUN_DIR": str(self.run.path), "MASTER_ADDR": "127.0.0.1",
            "HPCDDP_ATTEMPT": str(self.number), "MASTER_PORT": str(ports.number(self.ports[-1])),
        }  # fmt: skip
        with open(self.run.attempt(self.number).log, "ab") as log:
            return subprocess.Popen(
                [*python, "hpcddp.attempt.host", "ranks", *how, *srun], env=environ,
                stdout=log, stderr=log,
            )  # fmt: skip

    def pids(self) -> list[int]:
        """The ranks of the attempt."""
        lines = [json.loads(x) for x in self.metrics.read_text().splitlines()]
        return [rank["pid"] for x in lines if x["event"] == "ranks" for rank in x["ranks"]]

    @property
    def metrics(self) -> Path:
        return self.run.attempt(self.number).metrics


def assert_same(run: RunDir, other: RunDir) -> None:
    """The newest checkpoints of two runs are the same, bit for bit."""
    mine, theirs = weights(run), weights(other)
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


def newest(run: RunDir) -> int:
    return max(int(path.name[5:]) for path in run.checkpoints.glob("step-*"))


def weights(run: RunDir) -> dict[str, torch.Tensor]:
    from hpcddp.train.checkpoint import dcp_files

    return dcp_files.read_all(run.checkpoints / f"step-{newest(run)}")
