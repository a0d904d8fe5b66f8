"""Steps of 5 ms with and without the figures of all ranks, on 2 ranks of this machine.

Real ranks over gloo; both sides run in turn in the same processes. There is a record after each
step, and after every tenth step (the default). The time includes writing the record and its line,
and the check for slow ranks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from benchmarks.measure import Row
from benchmarks.site import PYTHON, Site, output
from hpcddp.attempt.rendezvous import free_port

LIMIT = 1.02
RANKS = 2
SLEEP = 4.5e-3  # seconds; with the exchange it makes 5 ms or more
BLOCKS, STEPS = 8, 100
LOOP = str(Path(__file__).with_name("timing_loop.py"))
WHEN = {"1": "each step", "10": "each tenth"}


def rows(site: Site) -> Iterator[Row]:
    taken = []
    for number in range(site.pairs):
        print(f"metrics: {number + 1} of {site.pairs}", file=sys.stderr)
        taken.append(_take(site))
    for every, when in WHEN.items():
        off, on = zip(*(take[every] for take in taken), strict=True)
        yield Row(f"metrics, {when}", on, off, ratio_limit=LIMIT)


def _take(site: Site) -> dict[str, tuple[float, float]]:
    """By steps between two records: seconds per step without and with the ranks' figures."""
    figures = site.fresh() / "figures"
    environ = site.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    loop = [PYTHON, "-P", LOOP, str(figures), str(SLEEP), str(BLOCKS), str(STEPS)]
    command = [PYTHON, "-P", "-m", "hpcddp.launch.spawn", "1", str(RANKS), *loop]
    output(command, environ, figures.parent)
    found = json.loads(figures.read_text())
    return {
        every: (median(off for off, _ in blocks), median(on for _, on in blocks))
        for every, blocks in found.items()
    }
