"""Step 3: keys that conflict with the strategy or another key, or that have no effect: a table.

It applies to jobs with a task. A key counts if its value is not the default, since the job.json of
a resumed run has all keys. checks.py has values that are wrong by themselves, or on a cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import NamedTuple

from hpcddp.errors import UserError
from hpcddp.keys import toml_text
from hpcddp.spec import KEYS, JobSpec
from hpcddp.strategy import Layout, is_single


class Clash(NamedTuple):
    """One row: these keys are not allowed if `when` is true."""

    keys: tuple[str, ...]
    when: Callable[[JobSpec, Layout], bool]
    why: str  # after "KEY is VALUE, but"
    instead: str = ""  # an alternative to removing the key


TRAVEL = ("ddp.hook", "ddp.join", "ddp.bucket_mb")  # the exchange of gradients
DDP = (*TRAVEL, "ddp.static_graph", "ddp.find_unused_parameters")
PP = ("pp.schedule", "pp.chunks")

CLASHES = (
    # keys without effect under the strategy
    Clash(DDP, lambda job, mesh: mesh.threads, "dp is one process and averages no gradients",
          "use ddp"),
    Clash(DDP, lambda job, mesh: is_single(job.strategy), "single is one process, without DDP"),
    Clash(TRAVEL, lambda job, mesh: mesh.world_size == 1, "one rank averages no gradients"),
    Clash(DDP, lambda job, mesh: mesh.pp > 1, "a pipeline averages gradients without DDP"),
    Clash(DDP, lambda job, mesh: not mesh.plain, "fsdp and tp average gradients without DDP",
          "use ddp or zero1"),
    Clash(PP, lambda job, mesh: mesh.pp == 1, "the strategy has no pipeline",
          "use a strategy with pp, such as pp=2,ddp"),
    Clash(("train.recompute", "train.compile"), lambda job, mesh: mesh.threads,
          "dp does not support it", "use ddp"),
    # keys that a pipeline excludes
    Clash(("train.drop_last",), lambda job, mesh: mesh.pp > 1,
          "the micro-batches of a pipeline must have the same size"),
    Clash(("train.find_micro_batch",), lambda job, mesh: mesh.pp > 1,
          "pp.chunks sets the micro-batches of a pipeline"),
    Clash(("train.find_micro_batch",), lambda job, mesh: mesh.pp == 1 and not mesh.plain,
          "a rank without enough memory would make the others wait forever",
          "set train.micro_batch"),
    # keys that conflict with another key
    Clash(("train.find_micro_batch",), lambda job, mesh: job.train.micro_batch > 0,
          "train.micro_batch already sets the size", "remove train.micro_batch"),
    Clash(("ddp.hook",), lambda job, mesh: job.ddp.hook == "local_sgd" and mesh.zero,
          "zero1 divides each update over the ranks, which local_sgd does not average in each step",
          "use ddp"),
    Clash(("ddp.hook",),
          lambda job, mesh: job.ddp.hook in ("fp16", "bf16") and job.train.precision == "fp64",
          "train.precision is fp64, and the hook would send 16 of its 64 bits"),
    Clash(("ddp.hook",),
          lambda job, mesh: job.ddp.hook == "powersgd" and job.train.precision == "fp16",
          "PowerSGD does not work with the loss scaling of fp16", "use train.precision=bf16"),
    Clash(("ddp.hook",),
          lambda job, mesh: job.ddp.hook == "powersgd" and job.ddp.static_graph,
          "PowerSGD keeps state per bucket, which ddp.static_graph rebuilds in each attempt",
          "set ddp.static_graph=false"),
    Clash(("ddp.hook",),
          lambda job, mesh: job.ddp.hook == "local_sgd" and mesh.world_size == job.gpus,
          "the ranks of a node average in each step, and all ranks are on one node"),
    Clash(("ddp.join",),
          lambda job, mesh: job.ddp.static_graph or job.ddp.find_unused_parameters,
          "a rank without samples cannot report which parameters were used",
          "set ddp.static_graph=false and ddp.find_unused_parameters=false"),
    Clash(("ddp.join",), lambda job, mesh: job.train.drop_last,
          "train.drop_last drops the uneven last batch", "set train.drop_last=false"),
    Clash(("ddp.rank",), lambda job, mesh: job.ddp.hook != "powersgd",
          "only powersgd uses it", "set ddp.hook=powersgd"),
    Clash(("ddp.after",), lambda job, mesh: job.ddp.hook not in ("powersgd", "local_sgd"),
          "only powersgd and local_sgd use it",
          "set ddp.hook to powersgd or local_sgd"),
    Clash(("ddp.period",), lambda job, mesh: job.ddp.hook != "local_sgd",
          "only local_sgd uses it", "set ddp.hook=local_sgd"),
)  # fmt: skip


def check(job: JobSpec, mesh: Layout, sources: Mapping[str, str]) -> None:
    """Refuse the first key that conflicts.

    Args:
        mesh: the strategy's, on the most nodes.
    """
    for row in CLASHES:
        for key in row.keys:
            value = attrgetter(key)(job)
            if value != KEYS.rows[key].default and row.when(job, mesh):
                shown = value if isinstance(value, str) else toml_text(value)
                raise UserError(
                    f"{key} is {shown}, but {row.why}",
                    where=sources.get(key, key),
                    hint=f"remove {key}" + (f", or {row.instead}" if row.instead else ""),
                )
