"""Ranks that train one run after the other in one process group: a start costs seconds.

python spread_ranks.py RANK SIZE STORE RUNS, the runs a JSON list of [run dir, attempt, step at
which it stops or 0, strategy or "" for the job's own].
"""

import json
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from hpcddp import record, spec
from hpcddp.preempt import Preemption
from hpcddp.rundir import RunDir
from hpcddp.topology import Rank
from hpcddp.train.job import train_in
from hpcddp.train.rank.world import World


def told(rank: int) -> dict[str, object]:
    """What a rank shows of itself."""
    return {"rank": rank, "node": 0, "local": rank, "host": f"h{rank}", "device": "cpu", "cpus": ""}


def train(run: RunDir, attempt: int, stop: int, strategy: str, rank: Rank) -> None:
    """One attempt."""
    job = record.read(run)
    asked = spec.from_dict(job.spec)
    asked.strategy = strategy or asked.strategy
    store, here = dist.HashStore(), [told(r) for r in range(rank.world_size)]
    world = World(rank, torch.device("cpu"), "gloo", here, store)
    preemption = Preemption()

    def look(told: dict[str, object]) -> None:
        preemption.requested = told["event"] == "train" and told["step"] == stop

    train_in(world, run, attempt, asked, job.workdir, preemption, look)


def main(rank: int, size: int, store: str, runs: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    for path, *how in json.loads(Path(runs).read_text()):
        try:
            node, local = divmod(rank, here := record.read(RunDir(path)).ranks_per_node)
            train(RunDir(path), *how, Rank(rank, size, local, here, node))
        except Exception:
            print(f"{path}, rank {rank}:", file=sys.stderr)
            traceback.print_exc()
            sys.stderr.flush()
            raise
    dist.barrier()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
