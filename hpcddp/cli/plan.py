"""`hpcddp plan`: estimate the memory and traffic of each strategy, and recommend one."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from hpcddp.cli.options import (
    CLUSTER,
    SET,
    STRATEGY,
    complete_jobs,
    flags,
    json_option,
    runs_root,
)
from hpcddp.cli.terminal import say, tables
from hpcddp.errors import UserError

if TYPE_CHECKING:
    from hpcddp.compare.recommend import Candidate
    from hpcddp.model_profile import ModelProfile
    from hpcddp.planning.asked import Asked
    from hpcddp.planning.clusters import Profile

WIDE = 80
COLUMNS = ("strategy", "weights", "grads", "optim", "activ", "other", "sum", "batch", "sent")


@click.command()
@click.argument("job", required=False, shell_complete=complete_jobs)
@click.option("-N", "--nodes", metavar="N",
              help="Number of nodes; the largest of a range counts.")  # fmt: skip
@click.option("--gpus", metavar="N", help="GPUs per node.")
@click.option("--memory", metavar="SIZE", help="Memory of one GPU, such as 80G.")
@click.option("--strategy", **STRATEGY, help="Only this strategy.")
@click.option("--cluster", **CLUSTER)
@click.option("--set", **SET)
@json_option
def plan(job: str | None, memory: str | None, as_json: bool, **given: Any) -> None:
    """Estimate the memory and traffic of JOB with each strategy, and recommend one.

    The table shows bytes of the rank that needs most: weights, gradients, optimizer state,
    activations, and other memory, such as buffers. "batch" is the samples of a micro-batch, then
    the micro-batches of a step. "sent" is the bytes that all ranks together send in a step. The
    model is built on this machine without its memory. Nothing is submitted.
    """
    from hpcddp import sizes
    from hpcddp.compare import recommend
    from hpcddp.planning import jobfile
    from hpcddp.planning.asked import Asked

    folder = Path.cwd()
    memory_given = sizes.bytes_of(memory or "", "--memory")
    layers, notes = jobfile.load(job, flags(given), os.environ, folder)
    asked = Asked.read(layers, notes, os.environ)
    notes = [*asked.notes]
    if asked.spec.command:
        raise UserError("`plan` requires a task, and the job has a command: its model is unknown",
                        where="command", hint="plan a job with a task")  # fmt: skip
    if asked.nodes.min != asked.nodes.max:
        notes.append(f"this is the plan of {asked.nodes.max} nodes (of {asked.nodes})")
    candidates, facts = _look(asked, given["strategy"], folder)
    for note in [*notes, *facts.notes, *_unknown(facts), *_room(asked)]:
        say.note(note)
    site = asked.profile.cluster
    device = facts.memory if site.backend == "local" else 0
    usable = memory_given or sizes.bytes_of(site.gpu_memory, str(asked.profile.path)) or device
    estimates = _Estimates(
        asked, candidates, usable, _backend(asked.profile, facts),
        *recommend.recommend(candidates, usable),
    )  # fmt: skip
    if as_json:
        click.echo(json.dumps(_plain(estimates)))
        return
    for line in _table(estimates):
        click.echo(line)


class _Estimates(NamedTuple):
    """The strategies, and the recommended one."""

    asked: Asked
    candidates: list[Candidate]
    memory: int
    backend: str
    recommended: str
    why: str


def _look(asked: Asked, text: str | None, folder: Path) -> tuple[list[Candidate], ModelProfile]:
    """The strategies to compare. It is an error if the one that the user names is impossible."""
    from hpcddp import strategy
    from hpcddp.compare import recommend

    if text:
        strategy.layout(text, asked.nodes.max, asked.gpus, "--strategy")
    texts = recommend.candidates(asked.nodes.max, asked.gpus)
    if "strategy" in asked.sources:
        texts.append(asked.spec.strategy)
    texts = [text] if text else list(dict.fromkeys(texts))
    candidates, facts = recommend.look(
        asked.spec, asked.sources, texts, asked.nodes, asked.gpus, folder
    )
    if text and candidates[0].reason:
        raise UserError(candidates[0].reason, where="--strategy")
    return candidates, facts


def _backend(profile: Profile, facts: ModelProfile) -> str:
    """The backend of the ranks' collectives."""
    if profile.cluster.backend == "local":
        return "nccl" if facts.memory else "gloo"
    return "gloo" if profile.cluster.gpu_option == "none" else "nccl"


def _room(asked: Asked) -> list[str]:
    """How long a preemption leaves, if Slurm says so, beside the times of an earlier run."""
    from hpcddp.planning import advice, earlier_runs

    rules = asked.now().site
    if not rules or not rules.preempts:
        return []
    measured = earlier_runs.of_job(asked.spec.name, asked.backend, runs_root(None))
    return [advice.room(rules, measured)]


def _unknown(facts: ModelProfile) -> list[str]:
    """The reasons why activations are not estimated."""
    from hpcddp.model_profile import TensorShare

    whys = {view.unknown: 1 for view in facts.views.values() if isinstance(view, TensorShare)}
    return [f"the memory of activations is unknown: {why}" for why in whys if why]


def _table(estimates: _Estimates) -> Iterator[str]:
    """The candidates as a table, then the impossible ones with reasons, then the recommendation."""
    possible = [candidate for candidate in estimates.candidates if candidate.estimate]
    lines = [COLUMNS, *(_cells(candidate, estimates.backend) for candidate in possible)]
    yield from tables.table(lines, right=range(1, len(COLUMNS)))
    yield ""
    for candidate in estimates.candidates:
        if candidate.reason:
            yield from _wrapped(f"{candidate.text}: {candidate.reason}", "  ")
    yield from _wrapped(estimates.why)


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        min(WIDE, tables.columns()),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _cells(candidate: Candidate, backend: str) -> tuple[str, ...]:
    from hpcddp.sizes import size

    assert candidate.estimate
    need, (micro, count) = candidate.estimate.most, candidate.estimate.micro
    other, sent = need.buffers + need.other, candidate.estimate.sent[backend]
    sizes = (need.parameters, need.gradients, need.optimizer, need.activations, other, need.sum)
    batch = f"{micro}x{count}" if count > 1 else str(micro)
    return (candidate.text, *("?" if n is None else size(n) for n in sizes), batch,
            "?" if sent is None else size(sent))  # fmt: skip


def _plain(estimates: _Estimates) -> dict[str, Any]:
    """The estimates as plain data."""
    from hpcddp.compare.recommend import FITS

    asked = estimates.asked
    return {
        "schema_version": 1,
        "job": asked.spec.name,
        "nodes": asked.nodes.max,
        "gpus_per_node": asked.gpus,
        "global_batch": asked.spec.global_batch,
        "backend": estimates.backend,
        "gpu_memory": estimates.memory or None,
        "usable": FITS,
        "rows": [_plain_row(each, estimates.memory) for each in estimates.candidates],
        "recommended": estimates.recommended or None,
        "why": estimates.why,
    }


def _plain_row(candidate: Candidate, memory: int) -> dict[str, Any]:
    if candidate.estimate is None:
        return {"strategy": candidate.text, "reason": candidate.reason}
    need, (micro, count) = candidate.estimate.most, candidate.estimate.micro
    sizes = {name: _whole(value) for name, value in need._asdict().items()}
    return {
        "strategy": candidate.text,
        "layout": str(candidate.layout),
        "reason": None,
        "memory": {**sizes, "sum": _whole(need.sum)},
        "fits": candidate.fits(memory) if memory else None,
        "micro_batch": micro,
        "accumulation": count,
        "sent": {name: _whole(value) for name, value in candidate.estimate.sent.items()},
    }


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)
