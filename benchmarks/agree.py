"""The time of the agreement on a stop per step, beside the step, on 2 and on 8 ranks.

Real ranks over gloo: a step sleeps and then exchanges gradients, so all ranks reach the agreement
together, as after a backward pass. The figure is the time inside `StopVote.agreed` over all steps,
including those without a vote. For each vote the time of the fastest rank counts: it arrived last
and waited for no other rank. The others would otherwise wait for it in the step's own exchange. On
fewer cores than ranks, most of this time is scheduling.

On 2 ranks the floor is 5 ms, the length of the step; on 8 ranks it is the measured length of the
step in the same processes without the agreement.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

from benchmarks.measure import Row
from benchmarks.site import PYTHON, Site, output
from hpcddp.attempt.rendezvous import free_port

LIMIT = 0.01
STEP = 5e-3  # seconds
STEPS = 400
SLEEP = {2: 4.5e-3, 8: 5e-3}  # ranks -> seconds of a step before its exchange
LOOP = str(Path(__file__).with_name("vote_loop.py"))


def rows(site: Site) -> Iterator[Row]:
    for ranks in SLEEP:
        taken = []
        for number in range(site.pairs):
            print(f"agree, {ranks} ranks: {number + 1} of {site.pairs}", file=sys.stderr)
            taken.append(_take(site, ranks))
        inside = [a for a, _ in taken]
        steps = [STEP if ranks == 2 else b for _, b in taken]
        yield Row(f"agree, {ranks} ranks", inside, steps, ratio_limit=LIMIT)


def _take(site: Site, ranks: int) -> tuple[float, float]:
    """Seconds per step inside the agreement, and of a step without it."""
    figures = site.fresh() / "figures"
    environ = site.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    loop = [PYTHON, "-P", LOOP, str(figures), str(SLEEP[ranks]), str(STEPS)]
    command = [PYTHON, "-P", "-m", "hpcddp.launch.spawn", "1", str(ranks), *loop]
    output(command, environ, figures.parent)
    found = json.loads(figures.read_text())
    votes = zip(*(inside for inside, _ in found), strict=True)
    return sum(map(min, votes)) / STEPS, mean(step for _, step in found)
