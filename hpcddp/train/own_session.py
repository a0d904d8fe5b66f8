"""The session of a script's own loop (attach.py), which says itself when a step is complete."""

from __future__ import annotations

import atexit
import contextlib
import sys
import weakref
from collections.abc import Callable
from typing import Any

from hpcddp.train.checkpoint import snapshot
from hpcddp.train.input.step_seeds import StepSeeds, default_generators
from hpcddp.train.parallel.model import share_buffers
from hpcddp.train.session import Session


class OwnSession(Session):
    """``follow`` is called after ``start``, and then ``mark`` after each step.

    ``fixed`` has the facts of a checkpoint that are the same in all.
    """

    leaves = False  # the script may save by itself until its stop signal

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._kept, self.fixed = "{}", dict[str, Any]()  # the meta.json of the last complete step
        self._seeds = StepSeeds(default_generators(self._world.device))

    def _newest(self, facts: dict[str, Any]) -> str:
        """That of the last complete step: the loop may be in the next one."""
        return self._kept

    def follow(self) -> None:
        """Follow the optimizer of a user's own loop, and its failure."""
        wrapper = weakref.ref(self._live.wrapper) if self._live.wrapper else lambda: None
        self._live.wrapper = None  # the script may delete its own before it ends the process group
        self.rescue.levelled = (model := wrapper()) is not None and model.broadcast_buffers

        def before(*_: Any) -> None:
            self.saver.join()
            if self.rescue.levels and (model := wrapper()):
                share_buffers(model)
            self.rescue.change()

        shown = sys.excepthook

        def failed(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            shown(kind, error, trace)
            self._failed(error)

        if not self._live.files:  # else saves are not in the background
            self._live.optimizer.register_step_pre_hook(before)
            sys.excepthook = failed
            if self.rescue.able:  # else nothing is seeded
                self._seeds.watch()
            atexit.register(self.rescue.leave)

    def seed(self) -> bool:
        """In a user's own loop, seed the generators for the next step, if this rank may be lost and
        its numbers with it; whether it did."""
        if self.rescue.able:
            self._seeds.seed(self.at.step)
        return self.rescue.able

    def mark(self, facts: Callable[[], dict[str, Any]]) -> None:
        """Note that a user's own loop has completed a step, and its body."""
        self._slot.count(self.at.step)
        if not self.rescue.able:
            return
        with contextlib.suppress(TypeError):  # a save says that its data are not plain
            kept = super()._newest(facts() | self.fixed)
            self.rescue.change()
            self._kept = kept
            self.rescue.mark(self.at)

    def checked(self, facts: dict[str, Any]) -> dict[str, Any]:
        """The plain data of a checkpoint of a user's own loop.

        Raises:
            UserError: those of the user are not plain.
        """
        snapshot.require_plain(facts["own"])
        return facts | self.fixed

    def drop(self) -> None:
        """Remove the folder of this attempt's saves, but not after a failure of this rank: others
        may still save."""
        if self._ended:
            self.lease.drop()
