"""One rank of `agree`: steps of a fixed length with an exchange of gradients, and the votes.

python vote_loop.py FIGURES STEP_SECONDS STEPS    with torchrun's variables

A step sleeps, then exchanges gradients as DistributedDataParallel does. After a warm-up there are
STEPS steps with the agreement after each, then STEPS steps without. Rank 0 writes to FIGURES, for
each rank, the seconds inside `StopVote.agreed` after each step, and the seconds of a step without
it.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from hpcddp.preempt import Preemption
from hpcddp.rundir import RunDir
from hpcddp.spec import TrainSpec
from hpcddp.topology import Rank
from hpcddp.train.checkpoint.lease import Lease
from hpcddp.train.divergence import DivergenceDetector
from hpcddp.train.meter import Meter
from hpcddp.train.rank import world as worlds
from hpcddp.train.rank.spread import replicas
from hpcddp.train.rank.world import World
from hpcddp.train.stop import StopVote

WARM_UP = 100  # steps, until the distance between votes no longer grows
GRADIENTS = 100_000  # numbers that are exchanged in a step


def main(figures: Path, length: float, steps: int) -> None:
    rank = Rank.from_env(os.environ)
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    world = worlds.join(rank, (1, 1), rank.world_size, local=True, address=address)
    world.connect()
    gradients = torch.ones(GRADIENTS)

    def step() -> None:
        time.sleep(length)
        dist.all_reduce(gradients)

    taken = _measured(world, figures.with_name("request.json"), step, steps)
    everything: list[object] = [None] * world.size
    dist.all_gather_object(everything, taken)
    if world.is_main:
        figures.write_text(json.dumps(everything))
    world.barrier()
    os._exit(0)  # closing gloo's threads can abort or hang, and is not measured


def _measured(
    world: World, request: Path, step: Callable[[], None], steps: int
) -> tuple[list[float], float]:
    guard = DivergenceDetector(replicas(world), TrainSpec(), torch.nn.Linear(4, 4), Meter(world))
    lease = Lease(RunDir(request.parent), 1)
    lease.folder.mkdir(parents=True, exist_ok=True)
    vote = StopVote(world, Preemption(), request, lease, guard)
    inside = []
    for now in range(1, WARM_UP + steps + 1):
        step()
        began = time.perf_counter()
        stops = vote.agreed(now)
        inside.append(time.perf_counter() - began)
        assert not stops
    began = time.perf_counter()
    for _ in range(steps):
        step()
    return inside[WARM_UP:], (time.perf_counter() - began) / steps


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
