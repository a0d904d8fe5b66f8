"""Which strategy a job should take on so many GPUs: the cost of each, the simplest that fits."""

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
from hpcddp.sizes import NodeRange, size
from hpcddp.spec import JobSpec
from hpcddp.strategy import Layout

FITS = 0.8  # of a GPU's memory: the rest is CUDA's own, work space of products, and gaps


@dataclass(frozen=True)
class Candidate:
    """One strategy with its cost, or with the reason why it cannot be used."""

    text: str
    layout: Layout | None
    estimate: Estimate | None = None
    reason: str = ""

    def fits(self, memory: int) -> bool:
        """Whether each rank has room, as far as its memory is known."""
        return self.estimate is not None and self.estimate.most.sum <= FITS * memory


def candidates(nodes: int, gpus: int) -> list[str]:
    """The strategies to look at, the simplest first. Ranks of tp talk all the time: they are of
    one node; stages of a pipeline say least, and lie between nodes."""
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
    """A row for each strategy, and the facts of the model.

    Args:
        nodes: the largest number counts.
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
    """The mesh of a strategy, or why the job cannot have it."""
    changed = dataclasses.replace(job, strategy=text)
    try:
        checks.batch(changed, nodes, gpus, sources)
        mesh = strategy.layout(text, nodes.max, gpus)
        conflicts.check(changed, mesh, sources)
    except UserError as error:
        return error.what
    return mesh


def ask(job: JobSpec, folder: Path, layouts: Sequence[Layout]) -> ModelProfile:
    """Look at the job's model in the Python that runs the job, in a process of its own.

    Raises:
        UserError: there is no torch, or the task or its model is wrong.
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
    """The error of the process that looks at the model, by its last line."""
    if last.startswith("ModuleNotFoundError") and "'torch'" in last:
        return UserError("there is no torch in this Python", where=sys.executable,
                         hint="the model is looked at with it: pip install torch")  # fmt: skip
    return HpcddpError(f"the model cannot be looked at: {last}", where=job.task,
                       hint="hpcddp run shows whether it trains")  # fmt: skip


def recommend(rows: Sequence[Candidate], memory: int) -> tuple[str, str]:
    """The simplest strategy that fits, "" for none; and why, in a sentence or two.

    Args:
        memory: bytes of a GPU; 0 if unknown.
    """
    # ddp is faster than dp's threads
    able = [row for row in rows if row.estimate and not (row.layout and row.layout.threads)]
    if not able:
        return "", "None of these can be: the reasons are in the table."
    unsure = "" if _known(able) else " Activations are not in these numbers: leave room."
    least = min(able, key=_sum)
    if not memory:
        needs = f"{_need(able[0])}, and {_need(least)}" if least is not able[0] else _need(least)
        return "", (f"The memory of a GPU is not known (--memory 80G): with a quarter more for "
                    f"what is not counted, {needs}.{unsure}")  # fmt: skip
    first = able[0]
    if first.fits(memory):
        return first.text, (f"{first.text} is the simplest, and fits: {size(_sum(first))} of "
                            f"{size(memory)}.{unsure}")  # fmt: skip
    if micro := smaller(first, memory):
        return first.text, (
            f"{first.text} is the simplest, and fits with --set train.micro_batch={micro}: it "
            f"takes {size(_sum(first))} of {size(memory)} because of its activations.{unsure}"
        )
    fitting = next((row for row in able if row.fits(memory)), None)
    if fitting:
        return fitting.text, (
            f"{first.text} needs {size(_sum(first))}, and of {size(memory)} it can have "
            f"{size(FITS * memory)}; {fitting.text} is the simplest that fits, with "
            f"{size(_sum(fitting))}.{unsure}"
        )
    return "", (
        f"None fits into {size(memory)}, of which a job can have {size(FITS * memory)}: "
        f"{least.text} needs least, {size(_sum(least))}. More GPUs, "
        f"a smaller train.micro_batch or train.recompute=true make it less.{unsure}"
    )


def smaller(row: Candidate, memory: int) -> int:
    """The largest micro-batch, of those that divide a rank's share, with which a plain strategy
    fits; 0 for none."""
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
    return f"{row.text} needs a GPU with {size(_sum(row) / FITS)}"
