"""The training set as optimizer steps: micro-batches of this rank, and their weights.

A step has ``global_batch`` samples, whatever the world size. This rank's share goes through the
model in as few equal micro-batches as ``train.micro_batch`` allows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hpcddp.errors import JobFileError
from hpcddp.spec import JobSpec
from hpcddp.strategy import Layout
from hpcddp.train.input.data_workers import end_workers, make_loader, read
from hpcddp.train.input.sampler import ResumableSampler
from hpcddp.train.input.samples import Samples
from hpcddp.train.input.seeding import mix
from hpcddp.train.monitor.timing import Clock
from hpcddp.train.rank.spread import Spread


class Micro(NamedTuple):
    """One forward pass: its number of samples, and how many of them are not padding."""

    size: int
    real: int


class Step(NamedTuple):
    """One optimizer step: number of samples over all ranks, and this rank's micro-batches."""

    samples: int
    micros: tuple[Micro, ...]


def split(share: int, limit: int, least: int = 1, multiple: int = 1) -> int:
    """Number of micro-batches of a rank's share: the least with equal sizes of at most ``limit``.

    Args:
        share: samples of a rank in a step.
        limit: most samples of a micro-batch; 0 for no limit.
        least: lower bound of the result, if the share has as many samples.
        multiple: the result is a multiple of it.

    Raises:
        JobFileError: no such number exists.
    """
    least = min(least, share)
    for count in range(least, share + 1):
        small = limit == 0 or share // count <= limit
        if share % count == 0 and count % multiple == 0 and small:
            return count
    raise JobFileError(
        f"cannot divide the {share} samples of a rank into a multiple of {multiple} micro-batches",
        where="global_batch",
        hint="change global_batch, or use another pp.schedule than interleaved",
    )


def chunks(spec: JobSpec, layout: Layout) -> tuple[int, int]:
    """The least number of micro-batches of a step, and a divisor of that number: a pipeline needs
    one micro-batch for each stage, and an interleaved one rounds of as many as ranks."""
    if layout.pp == 1:
        return 1, 1
    return spec.pp.chunks or layout.pp, layout.pp if spec.pp.schedule == "interleaved" else 1


class TrainData:
    """The training set, seen from one rank.

    Args:
        clock: measures the time in which the training waits for data.
    """

    def __init__(
        self, dataset: Any, spec: JobSpec, spread: Spread, clock: Clock | None = None
    ) -> None:
        size = spread.data_size
        self.dataset, self._clock = dataset, clock or Clock(spread.world.device)
        self.samples = _check(dataset, spec, size)
        self._global_batch = spec.global_batch
        self._drop_last, self._join = spec.train.drop_last, spec.ddp.join
        self._rank, self._ranks = spread.data_rank, size
        self._seed = spec.seed
        self._double = spec.train.precision == "fp64"
        self.device = spread.world.device
        self._chunks = chunks(spec, spread.layout)
        self._sampler = ResumableSampler(
            dataset,
            size,
            self._rank,
            seed=spec.seed,
            drop_last=spec.train.drop_last,
            multiple=spec.global_batch,
        )
        self._batches = _Batches(self._sampler, self.samples)
        self.cut(spec.train.micro_batch)
        # A generator of its own, since an iterator draws a seed: drawn from the default generator
        # it would change dropout after a resume.
        self._generator = torch.Generator()
        self._prefetch = spec.data.prefetch
        self.load(max(0, spec.data.workers))

    def load(self, workers: int) -> None:
        """Set the number of reading processes; call it before the first ``batches``."""
        self._loader: DataLoader[Any] = make_loader(
            Samples(self.dataset, self._seed),
            workers,
            self.device,
            prefetch=self._prefetch,
            batch_sampler=self._batches,
            generator=self._generator,
        )

    def first(self, count: int) -> list[list[int]]:
        """The indices of this rank's first micro-batches, at most ``count``."""
        self._sampler.set_position(0, 0)
        indices = iter(self._sampler)
        batches = [list(islice(indices, self.micro_batch)) for _ in range(count)]
        return [batch for batch in batches if batch]

    def cut(self, limit: int) -> None:
        """Limit the samples of a micro-batch (0: no limit) from the next ``batches`` on."""
        share = self._global_batch // self._ranks
        self.accumulation = split(share, limit, *self._chunks)
        self.micro_batch = self._batches.size = share // self.accumulation
        self._full = (Micro(self.micro_batch, self.micro_batch),) * self.accumulation

    def steps_left(self, consumed: int) -> int:
        """Optimizer steps of an epoch after ``consumed`` of its samples."""
        left = self.samples - consumed
        return left // self._global_batch if self._drop_last else -(-left // self._global_batch)

    def total_steps(self, spec: JobSpec, step: int, epoch: int, samples_consumed: int) -> int:
        """The step at which the training ends, from its current position."""
        limits = [spec.max_steps] if spec.max_steps else []
        if epochs := spec.epochs or (0 if limits else 1):
            limits.append(step + self._steps_to(epochs, epoch, samples_consumed))
        return min(limits)

    def _steps_to(self, epochs: int, epoch: int, consumed: int) -> int:
        """Optimizer steps from within ``epoch`` to the end of the last of ``epochs``."""
        if epochs <= epoch:
            return 0
        return self.steps_left(consumed) + (epochs - epoch - 1) * self.steps_left(0)

    def batches(self, epoch: int, consumed: int) -> Iterator[tuple[list[int], Any]]:
        """This rank's micro-batches of an epoch after ``consumed`` of its samples, in order: the
        sample indices, padding last, and the batch."""
        self._sampler.set_position(epoch, consumed)
        self._generator.manual_seed(mix(self._seed, epoch, self._rank))
        for batch in self._clock.reading(read(self._loader)):
            yield self._batches.taken.popleft(), batch

    def close(self) -> None:
        end_workers(self._loader)

    def step_at(self, consumed: int) -> Step:
        """The shape of the step after ``consumed`` samples of the epoch. With ``ddp.join``, without
        micro-batches of padding only, so a rank may have none."""
        left = self.samples - consumed
        if left >= self._global_batch:
            return Step(self._global_batch, self._full)
        padded = -(-left // self._ranks)
        real = -(-(left - self._rank) // self._ranks)  # padding comes last, on the last ranks
        sizes = [
            min(self.micro_batch, padded - done) for done in range(0, padded, self.micro_batch)
        ]
        micros = [
            Micro(size, max(0, min(size, real - i * self.micro_batch)))
            for i, size in enumerate(sizes)
        ]
        return Step(left, tuple(micro for micro in micros if micro.real or not self._join))

    def place(self, batch: Any, micro: Micro) -> Any:
        """A micro-batch on the device, without its padding (unless it is all padding)."""
        if 0 < micro.real < micro.size:
            batch = _map(batch, lambda t: t[: micro.real])
        return placed(batch, self.device, double=self._double)


class _Batches:
    """The sampler's indices in micro-batches, in the form that ``Samples`` expects.

    ``taken`` has the indices of micro-batches that the loader requested and has not delivered yet.
    """

    def __init__(self, sampler: ResumableSampler, samples: int) -> None:
        self._sampler, self._samples = sampler, samples
        self.size = 1
        self.taken: deque[list[int]] = deque()

    def __len__(self) -> int:
        return -(-len(self._sampler) // self.size)

    def __iter__(self) -> Iterator[list[int]]:
        self.taken.clear()
        epoch = self._sampler.epoch * self._samples
        indices = iter(self._sampler)
        while ids := list(islice(indices, self.size)):
            self.taken.append(ids)
            yield [epoch + index for index in ids]


def _check(dataset: Any, spec: JobSpec, world_size: int) -> int:
    """The dataset's size; JobFileError if it is too small, or the batch not divisible."""
    if spec.global_batch % world_size:
        raise JobFileError(
            f"global_batch {spec.global_batch} does not divide over {world_size} ranks",
            where="global_batch",
            hint=f"set global_batch to a multiple of {world_size}, such as "
            f"{max(1, round(spec.global_batch / world_size)) * world_size}",
        )
    try:
        size = len(dataset)
    except TypeError:
        raise JobFileError(
            "dataset('train') has no length",
            where=spec.task,
            hint="return a map-style dataset, with __len__ and __getitem__",
        ) from None
    needed = spec.global_batch if spec.train.drop_last else world_size
    if size < needed:
        raise JobFileError(
            f"the training set has {size} samples, fewer than "
            + (f"one global batch of {needed}" if spec.train.drop_last else f"{needed} ranks"),
            where=spec.task,
            hint="use more data, or fewer ranks and a smaller global_batch",
        )
    return size


def placed(batch: Any, device: torch.device, *, double: bool = False) -> Any:
    """A batch, or another container of tensors, on the device.

    Args:
        double: convert floating-point tensors to float64.
    """
    if device.type != "cpu":  # first: the converted ones would not be in pinned memory
        batch = _map(batch, lambda t: t.to(device, non_blocking=True))
    if double:
        batch = _map(batch, lambda t: t.double() if t.is_floating_point() else t)
    return batch


def _map(value: Any, change: Any) -> Any:
    """The value with all tensors inside of lists, tuples and dicts changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {k: _map(v, change) for k, v in value.items()}
    if isinstance(value, list | tuple):
        items = [_map(v, change) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
