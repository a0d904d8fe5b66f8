"""What contradicts the strategy or another key, or would do nothing."""

import os

import pytest
from sites import Site

from hpcddp.errors import UserError
from hpcddp.planning.conflicts import CLASHES
from hpcddp.planning.jobfile import Layer
from hpcddp.planning.plan import Plan
from hpcddp.rundir import RunDir
from hpcddp.submit import prepare


def plan(site: Site, strategy: str, gpus: int, *pairs: str) -> Plan:
    layer = Layer()
    layer.put("strategy", strategy, "--strategy")
    layer.put("gpus", gpus, "--gpus")
    for pair in pairs:
        name, _, value = pair.partition("=")
        layer.put(name, value, f"--set {name}", text=True)
    return site.plan(layer)


UNEVEN = "train.drop_last=false"

# strategy, GPUs, keys, the key that is refused -> words of the reason
REFUSED = {
    ("dp", 4, "ddp.hook=bf16", "ddp.hook"): "dp is one process",
    ("dp", 4, "ddp.find_unused_parameters=true", "ddp.find_unused_parameters"): "dp is one process",
    ("single", 1, "ddp.static_graph=true", "ddp.static_graph"): "single is one process",
    ("dp", 4, "train.recompute=true", "train.recompute"): "dp does not support it",
    ("dp", 4, "train.compile=true", "train.compile"): "dp does not support it",
    ("ddp", 1, "ddp.hook=bf16", "ddp.hook"): "one rank averages no gradients",
    ("ddp", 1, "ddp.bucket_mb=5", "ddp.bucket_mb"): "one rank averages no gradients",
    ("ddp", 1, f"ddp.join=true {UNEVEN}", "ddp.join"): "one rank averages no gradients",
    ("pp=2,ddp", 4, "ddp.hook=bf16", "ddp.hook"): "a pipeline averages gradients without DDP",
    ("pp=2,ddp", 4, "ddp.join=true", "ddp.join"): "a pipeline averages gradients without DDP",
    (
        "pp=2",
        2,
        "ddp.static_graph=true",
        "ddp.static_graph",
    ): "a pipeline averages gradients without DDP",
    ("fsdp", 4, "ddp.bucket_mb=5", "ddp.bucket_mb"): "average gradients without DDP",
    ("hsdp=2", 4, "ddp.hook=powersgd", "ddp.hook"): "average gradients without DDP",
    ("tp=2,ddp", 4, "ddp.find_unused_parameters=true", "ddp.find_unused_parameters"): "without DDP",
    ("ddp", 4, "pp.schedule=gpipe", "pp.schedule"): "no pipeline",
    ("fsdp", 4, "pp.chunks=4", "pp.chunks"): "no pipeline",
    ("pp=2,ddp", 4, UNEVEN, "train.drop_last"): "must have the same size",
    (
        "pp=2",
        2,
        "train.find_micro_batch=true",
        "train.find_micro_batch",
    ): "pp.chunks sets the micro-batches",
    (
        "fsdp",
        4,
        "train.find_micro_batch=true",
        "train.find_micro_batch",
    ): "without enough memory would make",
    (
        "tp=2,ddp",
        4,
        "train.find_micro_batch=true",
        "train.find_micro_batch",
    ): "would make the others wait forever",
    ("ddp", 4, "train.find_micro_batch=true train.micro_batch=4", "train.find_micro_batch"): (
        "train.micro_batch already sets the size"
    ),
    ("zero1", 4, "ddp.hook=local_sgd", "ddp.hook"): "divides each update over the ranks",
    ("ddp", 4, "ddp.hook=fp16 train.precision=fp64", "ddp.hook"): "train.precision is fp64",
    ("ddp", 4, "ddp.hook=bf16 train.precision=fp64", "ddp.hook"): "train.precision is fp64",
    ("ddp", 4, "ddp.hook=powersgd train.precision=fp16", "ddp.hook"): "the loss scaling of fp16",
    ("ddp", 4, "ddp.hook=powersgd ddp.static_graph=true", "ddp.hook"): "rebuilds in each attempt",
    ("ddp", 4, "ddp.hook=local_sgd", "ddp.hook"): "all ranks are on one node",
    ("ddp", 4, f"ddp.join=true ddp.static_graph=true {UNEVEN}", "ddp.join"): "which parameters",
    ("ddp", 4, f"ddp.join=true ddp.find_unused_parameters=true {UNEVEN}", "ddp.join"): (
        "which parameters were used"
    ),
    ("ddp", 4, "ddp.join=true", "ddp.join"): "drops the uneven last batch",
    ("ddp", 4, "ddp.rank=2", "ddp.rank"): "only powersgd uses it",
    ("ddp", 4, "ddp.rank=2 ddp.hook=bf16", "ddp.rank"): "only powersgd uses it",
    ("ddp", 4, "ddp.after=5", "ddp.after"): "only powersgd and local_sgd use it",
    ("ddp", 4, "ddp.after=5 ddp.hook=bf16", "ddp.after"): "only powersgd and local_sgd use it",
    ("ddp", 4, "ddp.period=5 ddp.hook=powersgd", "ddp.period"): "only local_sgd uses it",
}


@pytest.mark.parametrize("asked", REFUSED, ids=lambda asked: " ".join(map(str, asked[:3])))
def test_what_does_not_go_together(site: Site, asked: tuple[str, int, str, str]) -> None:
    strategy, gpus, keys, key = asked
    with pytest.raises(UserError) as caught:
        plan(site, strategy, gpus, *keys.split())
    assert caught.value.what.startswith(f"{key} is ")
    assert REFUSED[asked] in caught.value.what
    assert caught.value.where == f"--set {key}"
    assert f"remove {key}" in caught.value.hint


def test_no_row_stands_there_for_nothing() -> None:
    reasons = list(REFUSED.values())
    assert [row.why for row in CLASHES if not any(words in row.why for words in reasons)] == []


@pytest.mark.parametrize(
    ("strategy", "gpus", "keys"),
    [
        ("ddp", 4, "ddp.hook=powersgd ddp.rank=2 ddp.after=5 train.precision=fp64"),
        ("ddp", 4, "nodes=2 ddp.hook=local_sgd ddp.after=5 ddp.period=2"),
        ("ddp", 4, f"ddp.join=true ddp.hook=powersgd ddp.bucket_mb=5 {UNEVEN}"),
        ("ddp", 4, "ddp.hook=powersgd ddp.find_unused_parameters=true train.precision=bf16"),
        ("zero1", 4, "train.find_micro_batch=true"),
        ("zero1", 4, "ddp.hook=bf16 ddp.static_graph=true"),
        ("ddp", 1, "ddp.find_unused_parameters=true"),  # facts of a model, tried on one rank
        ("ddp", 1, "ddp.static_graph=true"),
        ("fsdp", 4, "ddp.bucket_mb=0 ddp.hook=none pp.chunks=0"),  # as they are anyway
        ("fsdp", 4, f"train.precision=fp16 train.on_divergence=skip {UNEVEN}"),
        ("fsdp,tp=2", 4, "train.recompute=true train.compile=true train.precision=fp64"),
        ("pp=2,ddp", 4, "pp.schedule=interleaved pp.chunks=8 train.precision=bf16"),
        ("dp", 4, "train.tf32=true train.deterministic=true train.find_micro_batch=true"),
    ],
)
def test_what_goes_together(site: Site, strategy: str, gpus: int, keys: str) -> None:
    assert plan(site, strategy, gpus, *keys.split()).spec.strategy == strategy


def test_a_run_that_is_planned_anew_has_asked_for_no_default(site: Site) -> None:
    """Its record names every key, and so would clash with every strategy."""
    site.slurm()
    run = prepare.new_run(plan(site, "fsdp", 4), site.runs)
    flags = Layer()
    flags.put("strategy", "pp=2,fsdp", "--strategy")
    again = prepare.again(RunDir(run.path), flags, os.environ)
    assert str(again.layout) == "pp=2,fsdp=2"
