"""The memory of a parent without ranks, as on a spare node, beside a Python with torch.

No other process of this machine should have torch in memory, as on that node: shared pages count in
parts.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from typing import IO

from benchmarks.measure import Row
from benchmarks.memory import held
from benchmarks.site import HPCDDP, PYTHON, Site, output
from hpcddp.attempt.link.channel import Channel
from hpcddp.attempt.link.parents import ADDRESS, NODE, SECRET
from hpcddp.rundir import RunDir

LIMIT = 300e6  # bytes
MOST = 5  # measurements: they hardly differ
PATIENCE = 60.0  # seconds


def rows(site: Site) -> Iterator[Row]:
    folder = site.fresh()
    output([HPCDDP, "render", "--cluster", "local"], site.environ, folder)
    (path,) = (folder / "runs").iterdir()
    pairs = min(site.pairs, MOST)
    print(f"idle: {pairs} measurements of each", file=sys.stderr)
    ours = [_parent(site, RunDir(path)) for _ in range(pairs)]
    yield Row("idle, parent", ours, [_bare() for _ in range(pairs)], unit="B", limit=LIMIT)


def _parent(site: Site, run: RunDir) -> float:
    """The bytes of a parent that waits for orders."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        mine = {ADDRESS: f"127.0.0.1:{door.getsockname()[1]}", SECRET: "secret", NODE: "0"}
        words = [PYTHON, "-P", "-m", "hpcddp.launch.parent", "2", PYTHON, "-m", "hpcddp.worker"]
        environ = {**site.environ, **mine, "HPCDDP_RUN_DIR": str(run.path)}
        with subprocess.Popen([*words, str(run.path)], env=environ) as parent:
            door.settimeout(PATIENCE)
            with closing(Channel(door.accept()[0], "secret")) as supervisor:
                _until_idle(supervisor)
                figure = held(parent.pid)
    return figure


def _until_idle(supervisor: Channel) -> None:
    """Wait for the first sign of life after the imports.

    Raises:
        TimeoutError: it did not come.
    """
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and not supervisor.closed:
        if any("steps" in message for message in supervisor.receive()):
            return
        time.sleep(0.05)
    raise TimeoutError("the parent does not wait for orders")


def _bare() -> float:
    """The bytes of a Python that has imported torch and nothing else."""
    words = [PYTHON, "-c", "import torch, torch.distributed; print(flush=True); input()"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as bare:
        lines: IO[bytes] | None = bare.stdout
        assert lines
        lines.readline()
        figure = held(bare.pid)
        bare.communicate(b"\n")
    return figure
