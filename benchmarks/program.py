"""A script that hpcddp carries, beside the same script under a bare srun: 2 x 4 ranks.

From sbatch to the script's first optimizer step with the launcher fork, and the proportional memory
of a node's ranks once everything is imported. The forked ranks' side includes the process that they
were forked from. With the launcher srun the script is the same from its first line on, so what is
compared is the time from the batch script's start until the last rank comes to that line: what it
takes longer is put on top of the bare srun's time to the first step, which varies more than that.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median

from benchmarks.measure import Row
from benchmarks.site import Site
from benchmarks.start import Cluster

OVERHEAD = 1.03
FORKED_TIME = 0.35
FORKED_MEMORY = 0.5
PROBE = str(Path(__file__).with_name("memory.py"))


def rows(site: Site) -> Iterator[Row]:
    cluster = Cluster(site)
    whole, forked, bare = site.interleave(
        "program", lambda: cluster.program("srun"), lambda: cluster.program("fork"), cluster.bare
    )
    line, by_hand = site.interleave(
        "first line", lambda: cluster.first_line("srun"), lambda: cluster.first_line("")
    )
    first = median(bare)
    carried = [first + ours - theirs for ours, theirs in zip(line, by_hand, strict=True)]
    yield Row("program, srun", carried, [first] * len(carried), ratio_limit=OVERHEAD)
    yield Row("program, whole", whole, bare)
    yield Row("program, fork", forked, bare, ratio_limit=FORKED_TIME)
    ours, floor = site.interleave(
        "memory, fork",
        lambda: cluster.carried("fork", PROBE)[0],
        lambda: cluster.by_hand(PROBE)[0],
    )
    yield Row("memory, fork", ours, floor, unit="B", ratio_limit=FORKED_MEMORY)
