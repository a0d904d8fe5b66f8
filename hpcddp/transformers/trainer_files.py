"""A run's checkpoint in the Trainer's own format, with one more file of each rank."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer_callback import ExportableState

OWN = "hpcddp_{}.pth"
OF_RANK = re.compile(r"(?:rng_state|hpcddp)_(\d+)\.pth")  # the files that each rank writes
STATE = "trainer_state.json"
SAVES = ("_save_optimizer_and_scheduler", "_save_scaler", "_save_rng_state")


class TrainerFiles:
    """Writes and finds a Trainer's checkpoints.

    Args:
        own: this rank's further state: tensors and plain data.
    """

    name = "transformers"

    def __init__(self, trainer: Trainer, own: Callable[[], dict[str, Any]]) -> None:
        self._trainer, self._own = trainer, own
        self.resumed: Path | None = None

    def write(self, folder: Path) -> list[Path]:
        """Write this rank's files into an existing folder, and return them; a collective."""
        trainer, rank = self._trainer, self._trainer.args.process_index
        trainer.store_flos()  # the only collective, so a rank that fails leaves none waiting
        with _for_one_folder(trainer):
            trainer.save_model(str(folder), _internal_call=True)
            for save in SAVES:
                getattr(trainer, save)(str(folder))
        if rank == 0:
            self._state().save_to_json(str(folder / STATE))
        own = folder / OWN.format(rank)
        torch.save(self._own(), own)
        if rank == 0:
            return [path for path in folder.rglob("*") if path.is_file() and _rank_of(path) == 0]
        return [own, folder / f"rng_state_{rank}.pth"]

    def _state(self) -> Any:
        """The Trainer's state with the present one of its callbacks."""
        trainer = self._trainer
        everyone = [*trainer.callback_handler.callbacks, trainer.control]
        with_state = [c for c in everyone if isinstance(c, ExportableState)]
        return dataclasses.replace(trainer.state, stateful_callbacks=with_state)

    def load(self) -> dict[str, Any]:
        """This rank's further state; empty in a new run, or with another number of ranks."""
        rank, size = self._trainer.args.process_index, self._trainer.args.world_size
        if self.resumed is None or len(list(self.resumed.glob(OWN.format("*")))) != size:
            return {}
        path = self.resumed / OWN.format(rank)
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        return state


def _rank_of(path: Path) -> int:
    match = OF_RANK.fullmatch(path.name)
    return int(match[1]) if match else 0


@contextlib.contextmanager
def _for_one_folder(trainer: Trainer) -> Iterator[None]:
    """Let only rank 0 write what is the same on all."""
    args, before = trainer.args, trainer.args.save_on_each_node
    args.save_on_each_node = False
    try:
        yield
    finally:
        args.save_on_each_node = before
