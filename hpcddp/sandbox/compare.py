"""Rehearsal: a run with faults compared step by step with a run without them."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any, NamedTuple

from hpcddp.rundir import RunDir, read_lines, read_step

Step = dict[str, Any]  # a line of a trace: step, epoch, ids, loss


def traces(run: RunDir, rank: int = 0) -> dict[int, list[Step]]:
    """Attempt -> the steps of a rank, in order; attempts without steps are left out.

    The job must record them: ``train.trace``.
    """
    attempts = {a.number: list(read_lines(a.trace(rank))) for a in run.all_attempts()}
    return {number: steps for number, steps in attempts.items() if steps}


class _Span(NamedTuple):
    """The first and the last step whose forward pass any rank has run in an attempt, and the last
    one that was completed."""

    first: int
    last: int
    completed: int


def _spans(run: RunDir) -> dict[int, _Span]:
    """Those of the attempts with steps."""
    spans = {}
    for attempt in run.all_attempts():
        lines = [list(read_lines(path)) for path in attempt.traces()]
        if steps := [each[end]["step"] for each in lines if each for end in (0, -1)]:
            completed = read_step(attempt)[0] or min(steps) - 1
            spans[attempt.number] = _Span(min(steps), max(steps), min(completed, max(steps)))
    return spans


def lost(run: RunDir) -> dict[int, int]:
    """Attempt -> the number of steps that it had completed, and the next attempt with steps took
    again."""
    pairs = itertools.pairwise(_spans(run).items())
    return {a: max(0, before.completed - after.first + 1) for (a, before), (_, after) in pairs}


def repeated(run: RunDir) -> int:
    """The number of steps that were in flight at the end of an attempt, and were taken again: they
    had changed nothing."""
    pairs = itertools.pairwise(_spans(run).values())
    return sum(max(0, a.last - max(a.completed, b.first - 1)) for a, b in pairs)


def difference(reference: RunDir, run: RunDir, ranks: int) -> str:
    """The first step with other samples or another loss than the reference's, or "".

    Repeated steps count each time; a missing step counts too, but for one that a rank was killed in
    when it had done its part: the others have completed it.
    """
    spans = _spans(run)
    for rank in range(ranks):
        expected = {line["step"]: line for lines in traces(reference, rank).values()
                    for line in lines}  # fmt: skip
        took = traces(run, rank)
        taken = {span.completed for n, span in spans.items()
                 if _last(took.get(n, []), span) == span.completed - 1}  # fmt: skip
        for attempt, lines in took.items():
            for line in lines:
                taken.add(line["step"])
                if other := _other(line, expected.get(line["step"])):
                    return f"{other} in step {line['step']} of rank {rank}, attempt {attempt}"
        if missing := sorted(expected.keys() - taken):
            return f"rank {rank} has no step {missing[0]}"
        if not expected:
            return f"rank {rank} recorded no steps"
    return ""


def _last(lines: list[Step], span: _Span) -> int:
    """The last step that a rank has recorded in an attempt, or the one before its first."""
    return int(lines[-1]["step"]) if lines else span.first - 1


def _other(line: Step, expected: Step | None) -> str:
    """The first difference between a step and the expected one; "" if they are equal."""
    if expected is None:
        return "no such step in the run without faults:"
    if (line["epoch"], line["ids"]) != (expected["epoch"], expected["ids"]):
        return "other samples"
    if line["loss"] != expected["loss"]:
        return f"loss {line['loss']!r} instead of {expected['loss']!r}"
    return ""


def digest(run: RunDir) -> str:
    """SHA-256 over the names, types, shapes and bytes of all weights and all of the optimizer's
    state in the newest complete checkpoint, with its step; "" if there is none."""
    import torch

    from hpcddp.train.checkpoint import checkpoint
    from hpcddp.train.checkpoint import stored_tensors as stored

    try:
        folder = next(iter(checkpoint.complete(run.checkpoints)), None)
    except FileNotFoundError:  # there is no run
        folder = None
    if folder is None:
        return ""
    tensors = stored.read(folder, stored.MODEL) | stored.read(folder, stored.OPTIMIZER)
    sha = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sha.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        sha.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return f"{checkpoint.step_of(folder)}:{sha.hexdigest()}"
