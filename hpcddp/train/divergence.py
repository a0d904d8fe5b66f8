"""Bad numbers: a loss that is nan, infinite, or exploded, on any rank.

The reaction of all ranks (``train.on_divergence``):

    stop       the training ends; nothing is saved
    rollback   all ranks return to the newest checkpoint and train without the bad step
    skip       the bad step is skipped; the check waits for the device in every step

Losses stay on the device, and are checked when ranks communicate anyway: in the vote on stopping,
in a log record, before a save. A save also checks the weights, since a bad gradient shows only in
the loss of the next step; each rank checks its share of the weights, which are equal on all ranks.
The optimizer's state is not checked: bad numbers in it have reached the weights in the same step.
So no checkpoint holds bad numbers.

With fp16, GradScaler skips steps whose scaled gradients overflow; that is not a divergence. The
checked loss is the one before scaling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpcddp.errors import Diverged
from hpcddp.spec import TrainSpec
from hpcddp.train.meter import Meter
from hpcddp.train.rank.readout import Readout
from hpcddp.train.rank.spread import Spread, local

LARGEST = torch.finfo(torch.float32).max
KEPT = 1024  # losses that wait for a check
SKIPS = 10  # most skipped steps in a row
ROLLBACKS = 3  # most rollbacks to one checkpoint


class Finding(NamedTuple):
    """The first bad number: its step (from 1), its rank, its loss."""

    step: int
    rank: int
    loss: float
    what: str  # loss, gradient or weights

    def facts(self) -> dict[str, Any]:
        """Plain data; JSON has neither nan nor inf."""
        loss = self.loss if math.isfinite(self.loss) else str(self.loss)
        return {"step": self.step, "rank": self.rank, "loss": loss, "what": self.what}


class RollBack(Exception):
    """Raised on all ranks together; the trainer rolls back."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


class DivergenceDetector:
    """Checks the losses of one rank, and agrees with the other ranks on the reaction.

    Args:
        module: the plain model; its weights are checked before a save.
        meter: drops the loss of a skipped step.
    """

    def __init__(self, spread: Spread, train: TrainSpec, module: nn.Module, meter: Meter) -> None:
        self._world, self._train, self._module, self._meter = spread.world, train, module, meter
        self._losses: list[tuple[int, Tensor]] = []  # of micro-batches, with their steps
        self._limit, self._readout = LARGEST, Readout(spread.world.device, 2)
        self.first_loss: float | None = None
        parameters = list(module.parameters())
        if spread.layout.plain:  # equal on all ranks: each checks some
            parameters = parameters[spread.world.rank.world_rank :: spread.world.size]
        # A weight that has -inf at the start is a mask of the user.
        self._share = [p for p in parameters if _finite([p])]
        self._buffers: list[tuple[Tensor, Tensor]] = []  # before this step
        self._skips = 0
        self._rollbacks: dict[str, int] = {}
        self._until = 0  # after a rollback, steps up to this one are checked one by one
        self._blamed: int | None = None  # the step that caused the rollback
        self._blamed_rank = 0

    def refer_to(self, loss: float | None) -> None:
        """Use the run's first loss as the reference; one below 1 counts as 1."""
        if self.first_loss is not None or loss is None or not math.isfinite(loss):
            return
        self.first_loss = loss
        if self._train.explode:
            self._limit = min(LARGEST, self._train.explode * max(1.0, abs(loss)))

    def begin(self, step: int) -> None:
        """Note the start of a step."""
        if self._careful(step):
            self._meter.mark()
            self._buffers = [(b, b.detach().clone()) for b in self._module.buffers()]

    def _careful(self, step: int) -> bool:
        return self._train.on_divergence == "skip" or step <= self._until

    def add(self, loss: Tensor, step: int) -> None:
        """Keep the loss of a micro-batch, without waiting for the device."""
        if len(self._losses) == KEPT:  # too many to keep: keep only the worst
            self._losses = [(self._losses[0][0], self._worst())]
        self._losses.append((step, loss))

    def _worst(self) -> Tensor:
        """The largest absolute loss so far; nan if one is nan."""
        if not self._losses:
            return torch.zeros((), device=self._world.device)
        return torch.stack([loss for _, loss in self._losses]).float().abs().max()

    def flag(self) -> Tensor:
        """1 on the device if a loss is bad, else 0."""
        return (~(self._worst() <= self._limit)).float()

    def bad(self) -> bool:
        """Whether a loss is bad; waits for the device."""
        return bool(self.flag().item())

    def suspect(self, step: int, number: Callable[[Tensor], float | complex]) -> bool:
        """Whether a loss until a step is bad; in another thread than the loop's.

        Args:
            number: reads one of the device, which may stand still for ever.
        """
        losses = [loss for at, loss in tuple(self._losses) if at <= step]
        return any(not abs(number(loss)) <= self._limit for loss in losses)

    def settle(self, step: int, bad: bool) -> None:
        """Continue, or raise on all ranks; a collective if numbers are bad.

        Args:
            step: optimizer steps taken.
            bad: whether any rank has bad numbers.
        """
        if bad:
            self._answer(self._culprit(step, self._bad_weights()))
        # When a vote is counted, losses of the next step may already be in the list.
        self._losses = [(at, loss) for at, loss in self._losses if at > step]

    def check(self, step: int) -> None:
        """Check losses and weights before a save; a collective."""
        weights = self._bad_weights()
        bad = torch.tensor(int(weights or self.bad()))
        if self._world.size > 1:
            dist.all_reduce(bad, dist.ReduceOp.MAX, group=self._world.control)
        if bad.item():
            self._answer(self._culprit(step, weights))
        self._losses.clear()

    def _bad_weights(self) -> bool:
        return not _finite(self._share)

    def _answer(self, finding: Finding) -> None:
        self._losses.clear()
        if self._train.on_divergence == "rollback":
            raise RollBack(finding)
        raise self._diverged(finding)

    def _diverged(self, finding: Finding, why: str = "") -> Diverged:
        reports = self._world.reports
        host = reports[finding.rank]["host"] if reports else ""
        words = {"gradient": "is not finite", "weights": "are not finite"}
        how = words.get(finding.what, f"is {finding.loss:.4g}")
        text = f"the {finding.what} of rank {finding.rank} {how} at step {finding.step}{why}"
        return Diverged(text, {**finding.facts(), "host": host})

    def _culprit(self, step: int, weights: bool, gradient: bool = False) -> Finding:
        """The first bad number of all ranks; a collective."""
        rank = self._world.rank.world_rank
        first: Finding | None = None
        kept = [(at, loss.item()) for at, loss in self._losses]
        for at, loss in kept:
            if not abs(loss) <= self._limit:
                first = Finding(at, rank, loss, "loss")
                break
        else:
            if weights or gradient:
                last = kept[-1][1] if kept else math.nan
                first = Finding(step, rank, last, "weights" if weights else "gradient")
        findings = self._world.gather(first)
        # A bad loss makes all ranks' gradients bad: of one step, the loss is the cause.
        return min((f for f in findings if f), key=lambda f: (f.step, f.what != "loss", f.rank))

    def leaves_out(self, step: int, *, scaled: bool) -> Finding | None:
        """The reason to skip this step, the same on all ranks; None to take it.

        A collective that waits for the device, if steps are checked one by one.

        Args:
            step: its number.
            scaled: a GradScaler checks the gradients.

        Raises:
            Diverged: more than SKIPS steps in a row.
        """
        if not self._careful(step):
            return None
        flags = torch.stack((self.flag(), torch.zeros((), device=self._world.device)))
        if not scaled:
            flags[1] = (~_finite(self._gradients())).float()
        if self._world.size > 1:
            dist.all_reduce(flags, dist.ReduceOp.MAX)
        loss, gradient = self._readout.numbers(flags)
        if loss or gradient:
            finding = self._culprit(step, False, bool(gradient))
        elif step == self._blamed:
            finding = Finding(step, self._blamed_rank, math.nan, "loss")
        else:
            self._skips = 0
            self._losses.clear()
            return None
        self._undo()
        self._skips += 1
        if self._skips > SKIPS:
            raise self._diverged(finding, f", and {self._skips} steps in a row were bad")
        return finding

    def _gradients(self) -> list[Tensor]:
        """All gradients except for sparse ones, which are not checked."""
        gradients = [p.grad for p in self._module.parameters() if p.grad is not None]
        return [g for g in gradients if g.layout == torch.strided]

    def _undo(self) -> None:
        """Undo the step: a BatchNorm has already counted its batch."""
        self._losses.clear()
        self._meter.drop()
        self._blamed = None
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)

    def go_back(self, finding: Finding, folder: Path | None) -> Path:
        """Allow a rollback to a checkpoint, if there is one and it was not used too often.

        Raises:
            Diverged: the training must end.
        """
        if folder is None:
            raise self._diverged(finding, ", and there is no checkpoint to roll back to")
        count = self._rollbacks[folder.name] = self._rollbacks.get(folder.name, 0) + 1
        if count > ROLLBACKS:
            raise self._diverged(finding, f", after {ROLLBACKS} rollbacks to {folder.name}")
        self._until, self._blamed, self._blamed_rank = finding.step, finding.step, finding.rank
        self._skips = 0
        self._losses.clear()
        return folder


def _finite(tensors: Sequence[Tensor]) -> Tensor:
    """Whether all numbers are finite, on the device. A sum keeps nan and inf, and is ten times as
    fast as a check of each number. Half precision is summed in float32, against overflow."""
    sums = [
        local(t.detach()).sum(dtype=torch.promote_types(t.dtype, torch.float32)).isfinite()
        for t in tensors
    ]
    return torch.stack(sums).all() if sums else torch.tensor(True)
