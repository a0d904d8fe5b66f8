"""One rank of `timing`: steps of a fixed length, with and without the figures of all ranks.

python timing_loop.py FIGURES STEP_SECONDS BLOCKS STEPS    with torchrun's variables

A step reads a batch, runs a small model, sleeps, exchanges gradients as DistributedDataParallel
does, and is counted. Each step, or every tenth, has a record that is read a step later, as in the
trainer. Both cases have BLOCKS blocks of STEPS steps, in turn with and without the figures of all
ranks. Rank 0 writes the seconds per step of each block to FIGURES.
"""

import itertools
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from hpcddp.rundir import RunDir
from hpcddp.topology import Rank
from hpcddp.train.meter import Meter
from hpcddp.train.monitor.metrics import Recorder
from hpcddp.train.monitor.slow_ranks import SlowRanks
from hpcddp.train.monitor.timing import Clock
from hpcddp.train.rank import world as worlds
from hpcddp.train.rank.world import World

GRADIENTS = 100_000  # numbers that are exchanged in a step
EVERY = (1, 10)  # steps between two records


class Loop:
    """Steps with their records.

    Args:
        every: steps between two records.
        whole: record the figures of all ranks.
    """

    def __init__(self, world: World, record: Recorder, length: float, every: int, *, whole: bool):
        self._length, self._every, self._record = length, every, record
        self._clock = Clock(world.device, whole=whole)
        self._meter = Meter(world, self._clock)
        self._model = torch.nn.Linear(16, 16)
        self._clock.watch([self._model])
        self._pace = SlowRanks(record, world.hosts, [0] * world.size, 1.5, lambda: "")
        self._batches = self._clock.reading(itertools.repeat(torch.ones(16, 16)))
        self._gradients, self._good = torch.ones(GRADIENTS), torch.zeros(())

    def seconds(self, steps: int) -> float:
        """Mean seconds per step."""
        self._meter.reset()
        began = time.perf_counter()
        for step in range(1, steps + 1):
            loss = self._model(next(self._batches)).sum().detach()
            time.sleep(self._length)
            dist.all_reduce(self._gradients)
            self._gradients.fill_(1)
            self._clock.count(16)
            self._meter.add(loss, 16)
            self._meter.step(0.1, None)
            if step > 1 and (step - 1) % self._every == 0:
                values, _ = self._meter.read()
                self._record("train", step=step, epoch=0, **values)
                self._pace.look(step, values, self._meter.ranks)
            if step % self._every == 0:
                self._meter.add_up(self._good)
        self._meter.read()
        return (time.perf_counter() - began) / steps


def main(figures: Path, length: float, blocks: int, steps: int) -> None:
    torch.set_num_threads(1)
    rank = Rank.from_env(os.environ)
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    world = worlds.join(rank, (1, 1), rank.world_size, local=True, address=address)
    world.connect()
    record = Recorder(RunDir(figures.parent).attempt(1), active=world.is_main)
    found = {}
    for every in EVERY:
        off, on = (Loop(world, record, length, every, whole=whole) for whole in (False, True))
        taken = [(off.seconds(steps), on.seconds(steps)) for _ in range(blocks + 1)]
        found[every] = taken[1:]  # after a warm-up
    if world.is_main:
        figures.write_text(json.dumps(found))
    world.barrier()
    sys.stdout.flush()
    os._exit(0)  # closing gloo's threads can abort or hang, and is not measured


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
