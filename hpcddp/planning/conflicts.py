"""Step 3: keys that contradict the strategy or one another, or that would do nothing. A table.

It is for a job with a task. A key counts if its value is not the default: a run that is resumed
names all of its values. A value that is wrong by its meaning alone, or on this cluster, belongs to
checks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import NamedTuple

from hpcddp.errors import UserError
from hpcddp.spec import KEYS, JobSpec
from hpcddp.strategy import Layout, is_single


class Clash(NamedTuple):
    """One row: these keys cannot be set where `when` holds."""

    keys: tuple[str, ...]
    when: Callable[[JobSpec, Layout], bool]
    why: str  # after "KEY is VALUE, but"
    instead: str = ""  # what to do rather than to leave the key out


TRAVEL = ("ddp.hook", "ddp.join", "ddp.bucket_mb")  # how gradients get to the other ranks
DDP = (*TRAVEL, "ddp.static_graph", "ddp.find_unused_parameters")
PP = ("pp.schedule", "pp.chunks")

CLASHES = (
    # keys without a use under the strategy
    Clash(DDP, lambda job, mesh: mesh.threads, "dp is one process, without gradients to average",
          "take ddp"),
    Clash(DDP, lambda job, mesh: is_single(job.strategy), "single is one process, without DDP"),
    Clash(TRAVEL, lambda job, mesh: mesh.world_size == 1, "one rank has nobody to average with"),
    Clash(DDP, lambda job, mesh: mesh.pp > 1, "the stages of a pipeline synchronise themselves"),
    Clash(DDP, lambda job, mesh: not mesh.plain, "fsdp and tp average gradients without DDP",
          "take ddp or zero1"),
    Clash(PP, lambda job, mesh: mesh.pp == 1, "the strategy has no pipeline",
          "take one with pp, such as pp=2,ddp"),
    Clash(("train.recompute", "train.compile"), lambda job, mesh: mesh.threads,
          "dp's copies of the model would call the first one's layers", "take ddp"),
    # keys that a pipeline rules out
    Clash(("train.drop_last",), lambda job, mesh: mesh.pp > 1,
          "the micro-batches of a pipeline are of one size"),
    Clash(("train.find_micro_batch",), lambda job, mesh: mesh.pp > 1,
          "a pipeline's micro-batches follow from pp.chunks"),
    Clash(("train.find_micro_batch",), lambda job, mesh: mesh.pp == 1 and not mesh.plain,
          "ranks that compute a layer together would wait for the one that lacks the memory",
          "set train.micro_batch"),
    # keys that contradict another key
    Clash(("train.find_micro_batch",), lambda job, mesh: job.train.micro_batch > 0,
          "train.micro_batch says how large it is", "take one of the two"),
    Clash(("ddp.hook",), lambda job, mesh: job.ddp.hook == "local_sgd" and mesh.zero,
          "zero1 gives each rank a share of every step's update, and these ranks step alone",
          "take ddp"),
    Clash(("ddp.hook",),
          lambda job, mesh: job.ddp.hook in ("fp16", "bf16") and job.train.precision == "fp64",
          "train.precision is fp64: a quarter of it would travel"),
    Clash(("ddp.hook",),
          lambda job, mesh: job.ddp.hook == "powersgd" and job.train.precision == "fp16",
          "PowerSGD would remember what fp16's loss scaling throws away", "take bf16"),
    Clash(("ddp.hook",),
          lambda job, mesh: job.ddp.hook == "powersgd" and job.ddp.static_graph,
          "PowerSGD remembers by buckets, and ddp.static_graph lays these anew in every attempt",
          "take one of the two"),
    Clash(("ddp.hook",),
          lambda job, mesh: job.ddp.hook == "local_sgd" and mesh.world_size == job.gpus,
          "the ranks of one node average in every step anyway"),
    Clash(("ddp.join",),
          lambda job, mesh: job.ddp.static_graph or job.ddp.find_unused_parameters,
          "a rank without a sample cannot tell which parameters were used", "take one of the two"),
    Clash(("ddp.join",), lambda job, mesh: job.train.drop_last,
          "train.drop_last leaves out what is uneven", "set train.drop_last=false"),
    Clash(("ddp.rank",), lambda job, mesh: job.ddp.hook != "powersgd",
          "it is PowerSGD's", "set ddp.hook=powersgd"),
    Clash(("ddp.after",), lambda job, mesh: job.ddp.hook not in ("powersgd", "local_sgd"),
          "there is nothing to begin with after plain averages",
          "set ddp.hook to powersgd or local_sgd"),
    Clash(("ddp.period",), lambda job, mesh: job.ddp.hook != "local_sgd",
          "it is local SGD's", "set ddp.hook=local_sgd"),
)  # fmt: skip


def check(job: JobSpec, mesh: Layout, sources: Mapping[str, str]) -> None:
    """Refuse the first key that clashes.

    Args:
        mesh: the strategy's, on the most nodes.
    """
    for row in CLASHES:
        for key in row.keys:
            value = attrgetter(key)(job)
            if value != KEYS.rows[key].default and row.when(job, mesh):
                shown = str(value).lower() if isinstance(value, bool) else value
                raise UserError(
                    f"{key} is {shown}, but {row.why}",
                    where=sources.get(key, key),
                    hint=f"leave {key} out" + (f", or {row.instead}" if row.instead else ""),
                )
