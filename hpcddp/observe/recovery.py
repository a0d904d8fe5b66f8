"""How a run continued in place after an attempt: the seconds of each phase, and replaced nodes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from hpcddp import record
from hpcddp.attempt import decision, ledger
from hpcddp.attempt.joblog import NEW_STEP
from hpcddp.attempt.ledger import Attempt
from hpcddp.errors import HpcddpError
from hpcddp.rundir import RunDir, read_json, read_lines, read_step
from hpcddp.slurm.hostlist import expand_hosts

FIRST = 10_000  # records of an attempt that are read, for its first new step


@dataclass(frozen=True)
class Recovery:
    """From the last step of an attempt, or from the failure of its start, to the first new step.

    Args:
        seconds: by phase: ``detection`` until the failure was known (not after a start that came to
            no step; after a launcher that tells nothing of it, a part of ``ending``), ``ending``
            until all ranks had ended and the newest step was saved, ``starting`` until the new
            ranks had met, ``restoring`` until they had the state, ``replaying`` until the first
            step that was not taken before.
            Those are left out that have not come, as in a program that reports no steps.
        replaced: lost node -> the node in its place; "" for none.
    """

    seconds: dict[str, float]
    replaced: dict[str, str]

    @property
    def done(self) -> bool:
        """Whether a new step was taken."""
        return "replaying" in self.seconds

    def __str__(self) -> str:
        phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in self.seconds.items())
        nodes = [f"{new or 'no node'} for {old}" for old, new in self.replaced.items()]
        total = f"in {sum(self.seconds.values()):.1f} s: " if self.done else ""
        text = "; ".join(filter(None, [f"{total}{phases}", *nodes]))
        return text if self.done else f"({text})"


def after(run: RunDir, before: Attempt, following: Attempt) -> Recovery | None:
    """How the next attempt continued in place, as far as it has; None if it did not, or if a record
    of it is damaged."""
    if before.action != decision.HERE or before.ended is None:
        return None
    marks: dict[str, float] = {}
    with contextlib.suppress(HpcddpError, OSError, LookupError, TypeError, ValueError):
        marks = dict(_marks(run, before, following))
    if not marks:
        return None
    at = read_step(run.attempt(before.number))[1]
    at = at or marks.pop("detection", 0.0) or marks.pop("ending")
    seconds = {}
    for phase, moment in marks.items():
        seconds[phase], at = max(0.0, moment - at), max(at, moment)
    replaced = _replaced(run, before, following)
    return Recovery(seconds, replaced) if seconds or replaced else None


def newest(run: RunDir) -> Recovery | None:
    """How the newest attempt of a run continued in place, if it did."""
    with contextlib.suppress(HpcddpError, OSError):
        folders = run.all_attempts()[-2:]
        facts = [facts for folder in folders if (facts := ledger.read(folder))]
        return after(run, *facts) if len(facts) == 2 else None
    return None


def _marks(run: RunDir, before: Attempt, following: Attempt) -> Iterator[tuple[str, float]]:
    """The end of each phase, in seconds since the epoch, in order."""
    if known := read_json(run.attempt(before.number).failed):
        yield "detection", float(known["time"])
    yield "ending", float(before.ended or 0.0)
    step = ledger.taken_before(run.attempt(following.number)) or 0
    phases = {"ranks": "starting", "start": "restoring"}
    for line in itertools.islice(read_lines(run.attempt(following.number).metrics), FIRST):
        event, moment = str(line.get("event")), float(line.get("time", 0.0))
        if event in phases:
            yield phases.pop(event), moment
        elif event in ("train", "step", NEW_STEP) and line.get("step", 0) > step:
            yield "replaying", moment
            return


def _replaced(run: RunDir, before: Attempt, following: Attempt) -> dict[str, str]:
    old, new = expand_hosts(before.nodes), expand_hosts(following.nodes)
    if not run.attempt(before.number).hosts.exists():  # it ended before it left out the spares
        with contextlib.suppress(HpcddpError, OSError):
            old = old[: len(old) - int(record.read(run).spec.get("spares", 0))]
    gone = [host for host in old if host not in new]
    come = [host for host in new if host not in old]
    return dict(itertools.zip_longest(gone, come[: len(gone)], fillvalue=""))
