"""Exit codes, errors and the causes of an attempt's end."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

from markdown import code, entry, sentence, table

from hpcddp import cli
from hpcddp.attempt import decision, exit_codes
from hpcddp.errors import HpcddpError


def commands() -> Iterator[str]:
    """The exit codes of the command line."""
    for number, text in cli.EXIT_CODES.items():
        yield from entry("exit-code", str(number), f"exit-code-{number}", [sentence(text)])


def ranks() -> Iterator[str]:
    """The exit codes of hpcddp's own that a rank leaves with."""
    source = inspect.getsource(exit_codes)
    rows = re.findall(r"^[A-Z]+ = (\d+)  # (.+)$", source, re.MULTILINE)
    yield from table(("code", "meaning"), [(code(number), sentence(text)) for number, text in rows])


def errors() -> Iterator[str]:
    """The error tree: what `kind` can be in an error's JSON object."""
    rows = (
        (code(cls.__name__), str(cls.exit_code), sentence(DESCRIBED[cls.__name__]))
        for cls in _tree(HpcddpError)
    )
    yield from table(("kind", "exit code", "meaning"), rows)


def _tree(cls: type[HpcddpError]) -> Iterator[type[HpcddpError]]:
    yield cls
    for child in cls.__subclasses__():
        if child.__module__ == cls.__module__:
            yield from _tree(child)


def _described() -> dict[str, str]:
    """Error -> its line in the tree that begins the module."""
    text = inspect.getmodule(HpcddpError).__doc__ or ""
    return dict(re.findall(r"^[ │├└─]*(\w+)(?: +\d)? +(\S.*)$", text, re.MULTILINE))


DESCRIBED = _described()


# Cause -> the end that it stands for.
MEANING = {
    decision.DONE: "the training is complete",
    decision.ASKED: "the ranks saved for `hpcddp stop`",
    decision.CANCELLED: "`hpcddp cancel` or `scancel`",
    decision.PREEMPTED: "Slurm preempted the job, or `hpcddp preempt` asked for it",
    decision.TIMEOUT: "the time limit of the job",
    decision.SIGNALLED: "a stop signal of unknown origin",
    decision.NODE: "a node failed",
    decision.REQUEUED: "Slurm put the job back into the queue",
    decision.CRASH: "a rank failed, or a signal killed it",
    decision.OOM: "a rank was out of memory",
    decision.HANG: "no step for longer than [`train.hang_seconds`](#key-train.hang_seconds) allows",
    decision.LOST: "a node gives no sign of life, and Slurm has not ended the job for it",
    decision.BAD_NODE: "a node failed its checks twice while the ranks started",
    decision.DIVERGED: "the loss or the weights are not finite, or the loss exploded",
    decision.MISTAKE: "all ranks failed in the same way before any progress",
    decision.ENVIRONMENT: "a step of [`[software]`](#key-software.modules) failed before the ranks "
    "could start",
    decision.REFUSED: "the checkpoint is of another model or format",
    decision.KILLED: "a SIGKILL that was not Slurm's ended the batch script",
    decision.SUPERSEDED: "a newer attempt owns the run",
    decision.UNKNOWN: "no record of the end",
}


def causes() -> Iterator[str]:
    """Why an attempt ends, and what follows."""
    rows = []
    for name, row in decision.CAUSES.items():
        meaning = MEANING[name]
        rows.append((code(name), meaning[:1].upper() + meaning[1:] + ".", _follows(name, row)))
    yield from table(("cause", "what ended the attempt", "what follows"), rows)


def _follows(name: str, row: decision.Cause) -> str:
    if name in (decision.DONE, decision.ASKED, decision.CANCELLED):
        return "The run stays ended."
    if name == decision.SUPERSEDED:
        return "The newer attempt continues the run."
    if row.final:
        return f"The run stays ended: {row.final}."
    early = f" unless no attempt got further: {row.early}" if row.early else ""
    key = f"[`requeue.{row.budget}`](#key-requeue.{row.budget})"
    limits = [f"{key} limits how often"] if row.budget else []
    if row.idle:
        limits.append(f"{row.idle} attempts in a row without progress end the run")
    return (
        f"The run is requeued{early}" + ("; " + "; ".join(limits) if limits else ", always") + "."
    )
