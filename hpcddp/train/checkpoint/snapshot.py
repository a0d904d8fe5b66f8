"""Converts the training state to a checkpoint and back: tensors, position, random numbers."""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hpcddp import __version__
from hpcddp.errors import CheckpointError, CheckpointForeign, UserError
from hpcddp.train.checkpoint import checkpoint
from hpcddp.train.checkpoint.disk_retry import DiskRetry
from hpcddp.train.checkpoint.lease import Lease
from hpcddp.train.parallel import optim, optim_state, state_dict
from hpcddp.train.parallel.hooks import PREFIX, Hook
from hpcddp.train.rank.spread import Spread

if TYPE_CHECKING:
    from hpcddp.train.checkpoint import dcp_files


@dataclass
class Position:
    """The position of a training: optimizer steps, complete epochs, samples of this epoch."""

    step: int = 0
    epoch: int = 0
    samples_consumed: int = 0


class FrameworkFiles(Protocol):
    """A framework that writes and reads the state of its training in a format of its own."""

    name: str
    resumed: Path | None  # the checkpoint to load, once it is chosen

    def write(self, folder: Path) -> list[Path]:
        """Write this rank's files into an existing folder, and return them; all ranks call it
        together."""


@dataclass
class Live:
    """The objects that change during training."""

    module: nn.Module
    optimizer: Optimizer
    scheduler: Any  # an LRScheduler, or another object with its state_dict
    scaler: Any  # a GradScaler, likewise
    more: Any = None  # another object whose state_dict is tensors and plain data
    hook: Hook | None = None  # the DDP communication hook
    files: FrameworkFiles | None = None  # holds all of the state instead
    wrapper: DistributedDataParallel | None = None  # the script's own

    @property
    def alike(self) -> bool:
        """Whether all ranks save the same, and have the state of a step until the next one. A
        script's further object may be an average of the weights, which changes with them."""
        hook = self.hook is None or self.hook.alike
        more = self.more is None or isinstance(self.more, nn.Module)
        return hook and more and not self.files and optim.own(self.optimizer) is self.optimizer


def meta(
    lease: Lease,
    spread: Spread,
    live: Live,
    at: Position,
    facts: dict[str, Any],
) -> dict[str, Any]:
    """The content of meta.json, as plain data, without the numbers in the optimizer's state.

    Args:
        facts: further entries.
    """
    return {
        **vars(at),
        **facts,
        "run": lease.run.name,
        "attempt": lease.attempt,
        "world": spread.world.size,
        "strategy": str(spread.layout),
        **_state_meta(live),
        "versions": {
            "hpcddp": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def text(meta: dict[str, Any]) -> str:
    """A meta.json as it is now: what it names may change.

    Raises:
        TypeError: data of the user are not plain.
    """
    return json.dumps(meta, default=Tensor.tolist)


def _state_meta(live: Live) -> dict[str, Any]:
    if live.files:
        empty: dict[str, Any] = {"param_groups": [], "state": {}}
        return {"files": live.files.name, "optimizer": empty, "scheduler": {}, "scaler": {}}
    return {
        "optimizer": {"param_groups": optim_state.groups(live.optimizer), "state": {}},
        "scheduler": optim.by_old_groups(live.scheduler.state_dict(), live.optimizer.param_groups),
        "scaler": live.scaler.state_dict(),
        "hook": live.hook.fits if live.hook else None,
    }


def require_plain(state: dict[str, Any]) -> None:
    """Check the user's own data for a checkpoint.

    Raises:
        UserError: a value is not plain data.
    """
    for name, value in state.items():
        try:
            json.dumps({name: value}, allow_nan=True)
        except TypeError:
            raise UserError(
                f"run.state[{name!r}] is a {type(value).__name__}, expected plain data",
                where="Run.state",
                hint="use numbers, strings, lists and dictionaries, such as tensor.item()",
            ) from None


def require_format(folder: Path, meta: dict[str, Any], live: Live) -> None:
    """Check that the checkpoint is of the kind that this training writes.

    Raises:
        CheckpointForeign: a framework wrote it, and another one or none would read it.
    """
    ours, theirs = live.files.name if live.files else "", str(meta.get("files") or "")
    if ours != theirs:
        raise CheckpointForeign(
            f"the checkpoint is of {theirs or 'hpcddp'}, and this script has one of "
            f"{ours or 'hpcddp'}",
            where=str(folder),
            hint="restore the script, or submit a new run",
        )


def position(meta: dict[str, Any], where: Path) -> Position:
    """The position in a checkpoint's meta."""
    try:
        return Position(*(int(meta[name]) for name in Position.__dataclass_fields__))
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(
            "meta.json has no step, epoch or samples_consumed", where=str(where)
        ) from None


def restore(
    folder: Path,
    meta: dict[str, Any],
    spread: Spread,
    live: Live,
    retry: DiskRetry,
    *,
    optimizer: bool = False,
    schedule: bool = False,
) -> None:
    """Load a checkpoint into the live objects; a collective.

    For a user's own optimizer or schedule, the options are loaded too, since a schedule sets the
    learning rate only when it steps. The options of hpcddp's optimizer and schedule follow from the
    job file and the step, so a changed value applies to the rest of the run. A rank that did not
    exist at the save keeps the random numbers of its seed. The strategy may have changed.

    Args:
        optimizer, schedule: whether it is the user's own.
    """
    from hpcddp.train.checkpoint import dcp_files

    saved = retry.read(lambda: dcp_files.shapes(folder))
    names = _check(folder, live, spread, saved)
    optim_state.begin(live.module, live.optimizer, names)
    rng = dcp_files.empty(saved, f"rng.{spread.stream}.")
    more = dcp_files.empty(saved, state_dict.MORE) if live.more else {}
    fits = live.hook and live.hook.fits == meta.get("hook")
    memory = dcp_files.empty(saved, f"{PREFIX}.{spread.world.rank.world_rank}.") if fits else {}
    _load(folder, spread, live, retry, {**rng, **more, **memory})
    optim_state.apply(live.module, live.optimizer, meta["optimizer"], options=optimizer or schedule)
    _schedule(live, meta, own=schedule)
    if live.scaler.is_enabled() and meta["scaler"]:
        live.scaler.load_state_dict(meta["scaler"])
    if more:
        live.more.load_state_dict(state_dict.unpack(more))
    if live.hook:
        live.hook.remember(memory)
    if rng:
        state_dict.set_rng(rng, spread.world.device)


def _load(
    folder: Path, spread: Spread, live: Live, retry: DiskRetry, empty: dict[str, Tensor]
) -> None:
    """Load the live tensors of module and optimizer, and the empty ones; a collective."""
    from hpcddp.train.checkpoint import dcp_files

    parts = state_dict.parts(live.module, live.optimizer, spread.holders)
    slices = {
        name: dcp_files.Slice.of(tensor, parts.where[name].size, parts.where[name].offsets)
        for name, tensor in parts.tensors.items()
        if not parts.where[name].nothing(tensor)
    }
    checkpoint.load(folder, {**slices, **empty}, retry)
    live.module.load_state_dict(parts.module)  # a module may have hooks there


def _schedule(live: Live, meta: dict[str, Any], *, own: bool) -> None:
    """Restore the position of the schedule.

    Args:
        own: whether it is the user's own.
    """
    if own:
        rates = optim.by_new_groups(meta["scheduler"], live.optimizer.param_groups)
        live.scheduler.load_state_dict(optim_state.like(rates, live.scheduler.state_dict()))
    elif isinstance(live.scheduler, LambdaLR):
        optim.go_to_step(live.scheduler, meta["step"])


def _check(folder: Path, live: Live, spread: Spread, saved: dcp_files.Shapes) -> set[str]:
    """All names in a checkpoint; CheckpointError on all ranks if it is of another model. A
    collective if ranks have different tensors."""
    where = state_dict.parts(live.module, live.optimizer, spread.holders).where
    sizes = {name: part.size for name, part in where.items() if name.startswith("model.")}
    if spread.layout.pp > 1:
        sizes = {name: size for some in spread.world.gather(sizes) for name, size in some.items()}
    return checkpoint.check_names(folder, sizes, saved)
