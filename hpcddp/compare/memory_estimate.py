"""The cost of a strategy, from the model's profile: memory of a GPU, and bytes sent in a step.

The profile is that of model_sketch.py. Memory follows Rajbhandari et al. (2020, ZeRO): parameters,
gradients and optimizer state, each whole or divided. Pipelines follow Narayanan et al. (2021): a
rank keeps the activations of the micro-batches in flight. A ring all-reduce over n ranks sends
2(n-1) times the data in total; an all-gather, a reduce-scatter and a broadcast send n-1 times the
data (Patarasuk and Yuan, 2009). gloo's reduce-scatter is an all-reduce. Hooks are those after
``ddp.after`` steps; PowerSGD follows Vogels et al. (2019).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hpcddp.model_profile import ModelProfile, TensorShare, Weight
from hpcddp.spec import JobSpec
from hpcddp.strategy import Layout

BACKENDS = ("nccl", "gloo")
HALF = ("fp16", "bf16")  # of ddp.hook


class Need(NamedTuple):
    """Bytes of one rank.

    Args:
        activations: at the end of a forward pass; None if unknown.
        other: gathered parameters and sent gradients of fully_shard, and PowerSGD's memory.
    """

    parameters: float
    gradients: float
    optimizer: float
    buffers: float
    activations: float | None
    other: float = 0.0

    @property
    def sum(self) -> float:
        return sum(filter(None, self))


@dataclass(frozen=True)
class Estimate:
    """The cost of one strategy.

    Args:
        needs: of each kind of rank.
        sent: backend -> bytes that all ranks send in a step; None if unknown.
        micro: samples of a micro-batch on a rank, and micro-batches of a step.
    """

    needs: list[Need]
    sent: dict[str, float | None]
    micro: tuple[int, int]

    @property
    def most(self) -> Need:
        """The need of the rank that needs most."""
        return max(self.needs, key=lambda need: need.sum)


def estimate(facts: ModelProfile, layout: Layout, job: JobSpec, gpus: int) -> Estimate | str:
    """The cost of a mesh, or the reason why the model does not support it.

    Args:
        gpus: of a node.
    """
    view, micro = facts.views[layout.tp], facts.micros[str(layout)]
    stages = facts.stages[stages_of(job, layout)]
    for fact in (view, stages, micro):
        if isinstance(fact, str):
            return fact
    assert not isinstance(view, str) and not isinstance(micro, str) and not isinstance(stages, str)
    costs = _Reckoning(facts, layout, job, view, stages, micro, gpus)
    needs = [costs.need(rank) for rank in range(layout.pp)]
    return Estimate(needs, {backend: costs.sent(backend) for backend in BACKENDS}, micro)


def stages_of(job: JobSpec, layout: Layout) -> int:
    """Stages of a mesh: 1 without a pipeline; an interleaved pipeline has two per rank."""
    return layout.pp * (2 if layout.pp > 1 and job.pp.schedule == "interleaved" else 1)


@dataclass(frozen=True)
class _Reckoning:
    """The calculation for one mesh."""

    facts: ModelProfile
    layout: Layout
    job: JobSpec
    view: TensorShare
    stages: list[list[int]]
    micro: tuple[int, int]
    gpus: int

    def _parts(self, rank: int) -> set[int]:
        """The parts of a rank of the pipeline."""
        return {part for stage in self.stages[rank :: self.layout.pp] for part in stage}

    def _rows(self, rank: int) -> list[tuple[Weight, list[int]]]:
        parts = self._parts(rank)
        rows = zip(self.facts.weights, self.view.shapes, strict=True)
        return [(weight, shape) for weight, shape in rows if weight.part in parts]

    @property
    def _sharded(self) -> bool:
        """Whether fully_shard divides the parameters."""
        mesh = self.layout
        return (mesh.fsdp > 1 or mesh.tp > 1) and mesh.data_size > 1

    @property
    def _copies(self) -> int:
        """Copies of the gradients: two if DDP's buckets are beside sums of micro-batches."""
        wrapped = self.layout.ddp > 1 and not self._sharded
        return 2 if wrapped and self.micro[1] > 1 else 1

    def need(self, rank: int) -> Need:
        """Bytes of a rank of the pipeline."""
        rows, by = self._rows(rank), self.layout.fsdp
        held = [(w, _share(shape, by)) for w, shape in rows]
        state = [(w, count * w.state + w.extra) for w, count in held]
        return Need(
            parameters=sum(w.size * count for w, count in held),
            gradients=self._copies * sum(w.size * count for w, count in held if w.trained),
            optimizer=self._zero(held) if self.layout.zero else sum(size for _, size in state),
            buffers=sum(self.facts.buffers[part] for part in self._parts(rank)),
            activations=None if self.view.unknown else self._activations(rank),
            other=self._gathered(rows) if self._sharded else self._remembered(rows),
        )

    def _zero(self, held: Iterable[tuple[Weight, int]]) -> float:
        """The largest share of ZeroRedundancyOptimizer, which assigns each parameter, the largest
        first, to the rank with the smallest share."""
        numbers, bytes_ = [0] * self.layout.ddp, [0.0] * self.layout.ddp
        stepped = (row for row in held if row[0].group >= 0)
        for weight, count in sorted(stepped, key=lambda row: (row[0].group, -row[1])):
            rank = numbers.index(min(numbers))
            numbers[rank] += count
            bytes_[rank] += count * weight.state + weight.extra
        return max(bytes_)

    def _activations(self, rank: int) -> float:
        samples, count = self.micro
        shared = samples / (self.gpus if self.layout.threads else 1)
        flying = _flying(self.job.pp.schedule, rank, self.layout.pp, count)
        stages = self.stages[rank :: self.layout.pp]
        kept = sum(self.view.saved[part].of(shared) for stage in stages for part in stage)
        kept *= flying / len(stages)
        if self.layout.pp > 1 and rank == self.layout.pp - 1:  # torch keeps a step's outputs
            kept += self.view.passed[-1].of(shared) * count
        return kept + self.view.inner.of(shared)

    def _gathered(self, rows: Sequence[tuple[Weight, list[int]]]) -> float:
        """Bytes that fully_shard gathers: parameters of no block, a block and the next one, its
        gradients and the copy of them that is sent. All gradients add to these if several
        micro-batches are summed before they are sent."""
        blocks, root = _by_block(rows)
        largest = max(blocks, default=0.0)
        adding = sum(w.size * math.prod(s) for w, s in rows if w.trained)
        gathered = root + 2 * largest + 2 * max(largest, root)
        return gathered + (adding if self.micro[1] > 1 else 0.0)

    def _remembered(self, rows: Sequence[tuple[Weight, list[int]]]) -> float:
        """PowerSGD's memory of unsent gradients: as large as the gradients."""
        if self.job.ddp.hook != "powersgd":
            return 0.0
        return sum(w.size * math.prod(s) for w, s in rows if w.trained)

    def sent(self, backend: str) -> float | None:
        """Bytes that all ranks send in a step."""
        mesh = self.layout
        if mesh.threads:
            return self._copied() if backend == "nccl" else 0.0
        total = 0.0
        for rank in range(mesh.pp):
            rows = self._rows(rank)
            traffic = self._shard_traffic(rows, backend) if self._sharded else self._averages(rank)
            total += mesh.tp * traffic + self._shared(rank)
        if mesh.tp > 1 or mesh.pp > 1:
            if self.view.unknown:
                return None
            total += mesh.data_size * self.micro[1] * self._along()
        return total

    def _shared(self, rank: int) -> float:
        """The first rank's buffers, if hpcddp broadcasts them and not DDP."""
        if self.layout.plain:
            return 0.0
        sizes = self.layout.ddp, self.layout.fsdp, self.layout.tp
        links = sum(math.prod(sizes) * (size - 1) / size for size in sizes)
        return links * sum(self.facts.buffers[part] for part in self._parts(rank))

    def _averages(self, rank: int) -> float:
        """DDP averages gradients and broadcasts rank 0's buffers; zero1 also sends parameters."""
        rows, others = self._rows(rank), self.layout.ddp - 1
        stepped = sum(w.size * math.prod(s) for w, s in rows if w.group >= 0)
        buffers = sum(self.facts.buffers[part] for part in self._parts(rank))
        trained = [(w, s) for w, s in rows if w.trained]
        if self.job.ddp.hook == "local_sgd" and self.gpus <= others:
            nodes = self.layout.ddp // self.gpus
            whole = 2 * sum(w.size * math.prod(s) for w, s in trained)
            averaged = whole * (nodes * (self.gpus - 1) + others / self.job.ddp.period)
        else:
            averaged = 2 * others * _hooked(self.job, trained)
        buffers *= self.layout.plain  # otherwise _shared counts them
        return averaged + others * (buffers + stepped * self.layout.zero)

    def _shard_traffic(self, rows: Sequence[tuple[Weight, list[int]]], backend: str) -> float:
        """fully_shard gathers a block for the forward and the backward pass, and other parameters
        once. Then it scatters gradients, and averages them between groups. In a pipeline a block
        stays gathered from one backward pass to the next forward pass."""
        mesh, (blocks, root) = self.layout, _by_block(rows)
        trained = sum(w.size * math.prod(s) for w, s in rows if w.trained)
        passes = self.micro[1]
        if mesh.pp > 1:
            gathers = (passes + 1) * sum(blocks) + root
        else:
            gathers = passes * (2 * sum(blocks) + root)
        scatter = trained * (2 if backend == "gloo" else 1)
        return mesh.ddp * (mesh.fsdp - 1) * (gathers + scatter) + 2 * (mesh.ddp - 1) * trained

    def _along(self) -> float:
        """Bytes of one micro-batch: sums over the ranks of tp, activations between stages, and
        their gradients."""
        mesh, samples = self.layout, self.micro[0]
        summed = sum(amount.of(samples) for amount in self.view.reduced)
        ends = [stage[-1] for stage in self.stages[:-1]]
        cuts = sum(self.view.passed[part].of(samples) for part in ends)
        return 2 * (mesh.tp - 1) * summed + 2 * mesh.tp * cuts

    def _copied(self) -> float:
        """nn.DataParallel copies the model to the other GPUs in each pass, and gradients back."""
        rows = zip(self.facts.weights, self.view.shapes, strict=True)
        sizes = [w.size * math.prod(s) * (1 + w.trained) for w, s in rows]
        return (self.gpus - 1) * self.micro[1] * (sum(sizes) + sum(self.facts.buffers))


def _share(shape: Sequence[int], ranks: int) -> int:
    """The most elements of a parameter on a rank: the ranks divide the rows."""
    if ranks == 1 or not shape:
        return math.prod(shape)
    return -(-shape[0] // ranks) * math.prod(shape[1:])


def _by_block(rows: Sequence[tuple[Weight, list[int]]]) -> tuple[list[float], float]:
    """Bytes of each block, and of the parameters outside of blocks."""
    blocks: dict[int, float] = {}
    for weight, shape in rows:
        blocks[weight.block] = blocks.get(weight.block, 0.0) + weight.size * math.prod(shape)
    root = blocks.pop(-1, 0.0)
    return list(blocks.values()), root


def _flying(schedule: str, rank: int, ranks: int, count: int) -> int:
    """Micro-batches of which a rank of a pipeline keeps the activations, over its stages."""
    if ranks == 1:
        return 1
    if schedule == "gpipe":
        return count
    if schedule == "interleaved":
        return min(2 * count, ranks + 2 * (ranks - 1 - rank) + 1)
    return min(count, ranks - rank)


def _hooked(job: JobSpec, rows: Iterable[tuple[Weight, list[int]]]) -> float:
    """Bytes of gradients that DDP averages in a step with ``ddp.hook``."""
    total = 0.0
    for weight, shape in rows:
        numbers = math.prod(shape)
        if job.ddp.hook == "powersgd" and len(shape) > 1:  # two factors, if at most half as large
            factors = job.ddp.rank * (shape[0] + numbers // shape[0])
            numbers = factors if 2 * factors < numbers else numbers
        total += numbers * (2 if job.ddp.hook in HALF else weight.size)
    return total
