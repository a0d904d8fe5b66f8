"""A strategy for a job on a number of GPUs: the cost of each, and the simplest that fits."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcddp import strategy
from hpcddp.compare import memory_estimate, model_query
from hpcddp.compare.memory_estimate import Estimate
from hpcddp.errors import HpcddpError, JobFileError, UserError
from hpcddp.model_profile import ModelProfile
from hpcddp.planning import checks, conflicts
from hpcddp.sizes import NodeRange, amount
from hpcddp.spec import JobSpec
from hpcddp.strategy import Layout

FITS = 0.8  # usable part of a GPU's memory; CUDA, workspaces and fragmentation need the rest


@dataclass(frozen=True)
class Candidate:
    """One strategy with its cost, or with the reason why the job cannot use it."""

    text: str
    layout: Layout | None
    estimate: Estimate | None = None
    reason: str = ""

    def fits(self, memory: int) -> bool:
        """Whether each rank's known memory fits."""
        return self.estimate is not None and self.estimate.most.sum <= FITS * memory


def candidates(nodes: int, gpus: int) -> list[str]:
    """The strategies to compare, the simplest first. The ranks of tp communicate most and share a
    node; the stages of a pipeline communicate least and are on different nodes."""
    if nodes * gpus == 1:
        return ["single"]
    texts = ["dp"] * (nodes == 1) + ["ddp", "zero1"] + ["hsdp"] * (nodes > 1 < gpus) + ["fsdp"]
    inside = [gpus] if nodes == 1 or gpus == 1 else []
    for tp in (n for n in (2, gpus) if gpus % n == 0 < gpus - 1):
        alone = tp == nodes * gpus
        texts += [f"tp={tp}"] if alone else [f"tp={tp},ddp", f"tp={tp},fsdp"]
    for pp in {2, nodes, *inside}:
        if pp > 1 and nodes * gpus % pp == 0:
            texts += [f"pp={pp}"] if pp == nodes * gpus else [f"pp={pp},ddp", f"pp={pp},fsdp"]
    if nodes > 1 < gpus:
        texts.append(f"pp={nodes},tp={gpus}")
    return list(dict.fromkeys(texts))


def look(
    job: JobSpec, sources: Mapping[str, str], texts: Sequence[str], nodes: NodeRange, gpus: int,
    folder: Path,
) -> tuple[list[Candidate], ModelProfile]:  # fmt: skip
    """A row for each strategy, and the profile of the model.

    Args:
        nodes: of a range the largest number is used.
        folder: where the job works.
    """
    meshes = {text: _mesh(job, sources, text, nodes, gpus) for text in texts}
    layouts = [mesh for mesh in meshes.values() if isinstance(mesh, Layout)]
    facts = ask(job, folder, layouts)
    rows = []
    for text, mesh in meshes.items():
        if isinstance(mesh, str):
            rows.append(Candidate(text, None, reason=mesh))
            continue
        estimate = memory_estimate.estimate(facts, mesh, job, gpus)
        if isinstance(estimate, str):
            rows.append(Candidate(text, mesh, reason=estimate))
        else:
            rows.append(Candidate(text, mesh, estimate))
    return rows, facts


def _mesh(
    job: JobSpec, sources: Mapping[str, str], text: str, nodes: NodeRange, gpus: int
) -> Layout | str:
    """The mesh of a strategy, or the reason why the job cannot use it."""
    changed = dataclasses.replace(job, strategy=text)
    try:
        checks.batch(changed, nodes, gpus, sources)
        mesh = strategy.layout(text, nodes.max, gpus)
        conflicts.check(changed, mesh, sources)
    except UserError as error:
        return error.what
    return mesh


def ask(job: JobSpec, folder: Path, layouts: Sequence[Layout]) -> ModelProfile:
    """The profile of the job's model, made in a separate process.

    Raises:
        UserError: torch is not installed, or the task or its model has an error.
    """
    stages = [memory_estimate.stages_of(job, layout) for layout in layouts]
    asked = {"meshes": layouts, "stages": stages}
    try:
        answer = model_query.ask("hpcddp.train.model_sketch", job, folder, asked)
    except model_query.NoAnswer as error:
        raise _failed(str(error), job) from None
    if "error" in answer:
        raise JobFileError(answer["error"].pop("what"), **answer["error"])
    return ModelProfile.load(answer)


def _failed(last: str, job: JobSpec) -> HpcddpError:
    """The error of the process that makes the profile, from its last line."""
    if last.startswith("ModuleNotFoundError") and "'torch'" in last:
        return UserError("torch is not installed in this Python", where=sys.executable,
                         hint="install torch; the estimate needs it")  # fmt: skip
    return HpcddpError(f"cannot examine the model: {last}", where=job.task,
                       hint="check with `hpcddp run` whether the task trains")  # fmt: skip


def recommend(rows: Sequence[Candidate], memory: int) -> tuple[str, str]:
    """The simplest strategy that fits, or ""; and the reason, in one or two sentences.

    Args:
        memory: bytes of a GPU; 0 if unknown.
    """
    # dp is left out: ddp is faster than its threads.
    able = [row for row in rows if row.estimate and not (row.layout and row.layout.threads)]
    if not able:
        return "", "No strategy works for this job: see the reasons above."
    unsure = "" if _known(able) else " These numbers do not include activations."
    least = min(able, key=_sum)
    if not memory:
        needs = f"{_need(able[0])}, and {_need(least)}" if least is not able[0] else _need(least)
        return "", (f"The memory of a GPU is unknown: give it with --memory, such as 80G. "
                    f"With a reserve of 20%, {needs}.{unsure}")  # fmt: skip
    first = able[0]
    if first.fits(memory):
        return first.text, (f"Use {first.text}: it is the simplest and needs "
                            f"{amount(_sum(first))} of {_usable(memory)}.{unsure}")  # fmt: skip
    if micro := smaller(first, memory):
        return first.text, (
            f"Use {first.text} with --set train.micro_batch={micro}: it is the simplest. With the "
            f"present micro-batch it needs {amount(_sum(first))} of {_usable(memory)}.{unsure}"
        )
    fitting = next((row for row in able if row.fits(memory)), None)
    if fitting:
        return fitting.text, (
            f"Use {fitting.text}: it is the simplest that fits, and needs "
            f"{amount(_sum(fitting))} of {_usable(memory)}; {first.text} needs "
            f"{amount(_sum(first))}.{unsure}"
        )
    return "", (
        f"No strategy fits in {_usable(memory)}: {least.text} needs least, "
        f"{amount(_sum(least))}. Use more GPUs, a smaller train.micro_batch or "
        f"--set train.recompute=true.{unsure}"
    )


def smaller(row: Candidate, memory: int) -> int:
    """The largest micro-batch that fits and divides a rank's share of the batch, for strategies
    with the whole model on each rank; 0 for none."""
    assert row.estimate
    need, (micro, count) = row.estimate.most, row.estimate.micro
    if need.activations is None or not row.layout or not row.layout.plain:
        return 0
    room = FITS * memory - (need.sum - need.activations)
    share = micro * count
    fitting = (n for n in range(micro, 0, -1) if share % n == 0)
    return next((n for n in fitting if need.activations * n / micro <= room), 0)


def _known(rows: Sequence[Candidate]) -> bool:
    return all(row.estimate and row.estimate.most.activations is not None for row in rows)


def _sum(row: Candidate) -> float:
    return row.estimate.most.sum if row.estimate else math.inf


def _need(row: Candidate) -> str:
    return f"{row.text} needs a GPU with {amount(_sum(row) / FITS)}"


def _usable(memory: int) -> str:
    return f"{amount(memory)} ({amount(FITS * memory)} usable)"
