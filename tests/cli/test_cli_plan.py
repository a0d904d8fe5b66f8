"""`hpcddp plan`: what a person reads, and what a program reads."""

import json
from collections.abc import Callable

import pytest
from sites import Outcome, Site
from toy_model import TOY

Hpcddp = Callable[..., Outcome]


@pytest.fixture
def toy(site: Site) -> Site:
    site.job("toy", "global_batch = 96\n", TOY)
    return site


def test_a_table_and_advice_in_80_columns(toy: Site, hpcddp: Hpcddp) -> None:
    words = ("plan", "toy", "--nodes", "2", "--gpus", "4", "--memory", "80G", "--cluster", "slurm")
    done = hpcddp(*words)
    lines = done.out.splitlines()
    assert (done.code, done.err) == (0, "")
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == [
        "strategy", "weights", "grads", "optim", "activ", "other", "sum", "batch", "sent",
    ]  # fmt: skip
    rows = {line.split()[0]: line.split()[1:] for line in lines[1:] if line.endswith(("K", "M"))}
    assert {"ddp", "zero1", "hsdp", "fsdp", "tp=4,ddp", "pp=2,fsdp", "pp=2,tp=4"} <= rows.keys()
    assert rows["ddp"][:3] == ["75K", "75K", "150K"] and rows["ddp"][6] == "12"
    assert rows["fsdp"][0] == "10.1K"  # the last layer's 10 rows are 2 at most
    assert lines[-1].startswith("Use ddp: it is the simplest and needs ")


def test_json_has_bytes_and_reasons(toy: Site, hpcddp: Hpcddp) -> None:
    done = hpcddp("plan", "toy", "--gpus", "5", "--cluster", "local", "--json")
    plan = json.loads(done.out)
    assert (plan["schema_version"], plan["nodes"], plan["gpus_per_node"]) == (1, 1, 5)
    assert (plan["gpu_memory"], plan["recommended"]) == (None, None)
    rows = {row["strategy"]: row for row in plan["rows"]}
    assert rows["ddp"] == {
        "strategy": "ddp",
        "reason": "global_batch 96 does not divide over 1 x 5 = 5 ranks",
    }
    assert rows["tp=5"]["reason"] == "tp cannot divide 0 over 5 ranks: it has 256 outputs"
    assert "cannot make 5 stages from 2 parts" in rows["pp=5"]["reason"]
    single = rows["dp"]
    assert single["memory"]["parameters"] == 4 * (64 * 256 + 256 + 2560 + 10)
    assert single["memory"]["sum"] == sum(
        single["memory"][name]
        for name in ("parameters", "gradients", "optimizer", "buffers", "activations", "other")
    )


def test_a_profile_knows_its_gpus(toy: Site, hpcddp: Hpcddp) -> None:
    toy.profile("small", 'gpu_memory = "200K"\n')
    plan = json.loads(hpcddp("plan", "--gpus", "4", "--cluster", "small", "--json").out)
    fits = {row["strategy"]: row.get("fits") for row in plan["rows"]}
    assert "(160 KB usable)" in plan["why"]
    assert (plan["gpu_memory"], fits["ddp"], fits[plan["recommended"]]) == (200 * 1024, False, True)


def test_one_strategy_is_looked_at_alone(toy: Site, hpcddp: Hpcddp) -> None:
    plan = json.loads(hpcddp("plan", "--gpus", "4", "--strategy", "pp=2,ddp", "--json").out)
    assert [(row["strategy"], row["layout"]) for row in plan["rows"]] == [
        ("pp=2,ddp", "pp=2,ddp=2")
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "unknown job 'nowhere'"),
        (["toy", "--memory", "much"], "invalid memory size 'much'"),
        (["toy", "--gpus", "0"], "--gpus"),
        (["toy", "--gpus", "4", "--strategy", "tp=3"], "--strategy: tp=3 = 3, but there are 1 x 4"),
        (["toy", "--set", "train.lrr=1"], "did you mean train.lr?"),
        (["script"], "the job has a command"),
        (["broken"], "model() fails: ZeroDivisionError"),
    ],
)
def test_mistakes_are_words(toy: Site, hpcddp: Hpcddp, words: list[str], message: str) -> None:
    toy.job("script", 'command = ["true"]\n')
    toy.job("broken", "global_batch = 4\n", TOY.replace('print("made")', "1 / 0"))
    done = hpcddp("plan", *words)
    assert (done.code, done.out) == (2, "")
    assert message in done.err and "Traceback" not in done.err


def test_a_python_without_torch_is_told(
    toy: Site, hpcddp: Hpcddp, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n"
    monkeypatch.setenv("PYTHONPATH", str(toy.write("without/torch.py", missing).parent))
    done = hpcddp("plan", "toy")
    assert done.code == 2
    assert "torch is not installed in this Python" in done.err and "install torch" in done.err
