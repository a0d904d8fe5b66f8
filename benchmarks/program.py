"""A script submitted with hpcddp, beside the same script under a bare srun: 2 x 4 ranks.

The time from sbatch to the script's first optimizer step with the launcher fork, and the
proportional memory of a node's ranks after all imports. The memory of forked ranks includes their
parent process. With the launcher srun both sides run the same script from its first line. So only
the time from the start of the batch script to the first line of the last rank is compared. The
difference is added to the bare srun's time to the first step, because that time varies more than
the difference.
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
