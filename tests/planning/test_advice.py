"""Warnings before a job is submitted: from what its earlier runs took, and what Slurm says."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
from sites import Outcome, Site, record_run
from toy_model import TOY

from hpcddp import spec
from hpcddp.attempt import ledger
from hpcddp.planning import advice
from hpcddp.planning.advice import AdviceInputs, Measured
from hpcddp.planning.jobfile import Layer
from hpcddp.rundir import RunDir, write_json
from hpcddp.slurm import rules as sites

CONFIG = "KillWait = 25 sec\nPreemptType = preempt/partition_prio\nPreemptMode = REQUEUE\n"
PARTITION = "PartitionName=gpu Default=YES GraceTime=5 PreemptMode=REQUEUE DefaultTime=NONE "
SIGNALS = "SlurmctldParameters = preempt_send_user_signal\n"


def slurm(site: Site, config: str = CONFIG, partition: str = PARTITION + "MaxTime=1:00:00") -> None:
    """A Slurm that accepts everything and has no job."""
    said = f"*config*) cat <<'E'\n{config}E\n;;\n*partition*) echo '{partition}';;"
    site.program("scontrol", f'case "$*" in\n{said}\nesac')
    site.program("sbatch", 'echo "sbatch: Job 7 to start" >&2')
    site.program("squeue", "exit 0")
    site.program("sinfo", "exit 0")


def earlier(
    site: Site, save: float, step: float = 1.0, *, start: float = 20.0, name: str = "toy",
    number: int = 1, backend: str = "slurm", run: str = "",
) -> RunDir:  # fmt: skip
    """A run that ended, with what it measured."""
    folder = RunDir(site.runs / (run or f"{name}-20260101-0000-{len(list(site.runs.glob('*')))}"))
    folder.attempt(number).path.mkdir(parents=True)
    asked = spec.to_dict(spec.KEYS.build({"name": name, "task": "toy.py", "global_batch": 96}))
    record_run(folder, (1, 1), 1, backend, spec=asked, workdir=str(site.folder), cluster="slurm")
    facts = ledger.life("5", 1, slurm=True)
    facts.number, facts.began, facts.ended, facts.cause = number, 1000.0, 2000.0, "stopped"
    write_json(folder.attempt(number).facts, asdict(facts))
    lines: list[dict[str, Any]] = [
        {"event": "train", "step": 1, "time": 1000.0 + start, "step_s": 50 * step, "loss": 1.0},
        {"event": "train", "step": 10, "step_s": step / 2, "loss": 1.0},
        {"event": "checkpoint", "step": 10, "seconds": save},
        {"event": "train", "step": 20, "step_s": step, "loss": 1.0},
        {"event": "checkpoint", "step": 20, "seconds": save / 2},
    ]
    folder.attempt(number).metrics.write_text("".join(json.dumps(x) + "\n" for x in lines))
    write_json(folder.submission, {"backend": backend, "job_id": "5", "submitted": time.time()})
    when = time.time() - 1000 + len(list(site.runs.glob("*")))  # each newer than the one before
    os.utime(folder.job, (when, when))
    return folder


def test_a_save_that_cannot_fit_is_told_and_nothing_is_refused(
    site: Site, hpcddp: Callable[..., Outcome]
) -> None:
    slurm(site)
    run = earlier(site, save=95)
    for command in (["submit", "--dry-run"], ["render"]):
        done = hpcddp(*command, "toy", "--cluster", "slurm")
        assert done.code == 0
        warned = [line for line in done.err.splitlines() if line.startswith("warning: ")]
        assert len(warned) == 1
        assert "saves take 95 s" in warned[0] and "this partition gives 30 s" in warned[0]
        assert run.name in warned[0]
        assert "warning" not in done.out


def test_resume_goes_by_the_run_itself(site: Site, hpcddp: Callable[..., Outcome]) -> None:
    slurm(site)
    slow = earlier(site, save=95, run="toy-slow")
    earlier(site, save=1, run="toy-newer")
    assert "warning" not in hpcddp("submit", "--dry-run", "toy", "--cluster", "slurm").err
    done = hpcddp("resume", slow.name, "--detach")
    assert "saves take 95 s" in done.err


def test_other_jobs_and_other_machines_say_nothing(
    site: Site, hpcddp: Callable[..., Outcome]
) -> None:
    slurm(site)
    earlier(site, save=95, name="toy-2")
    earlier(site, save=95, backend="local")
    assert "warning" not in hpcddp("submit", "--dry-run", "toy", "--cluster", "slurm").err


def test_nothing_is_said_where_slurm_is_silent_or_nothing_was_measured(site: Site) -> None:
    slurm(site)
    assert advice.advise(site.plan()) == []
    plan = site.plan(measured=advice.measured(earlier(site, save=95)))
    assert len(advice.advise(plan)) == 1
    assert advice.advise(replace(plan, site=None)) == []


LOW = sites.Site(preempt_mode="REQUEUE", grace=5, kill_wait=25)
FAST, SLOW = Measured(0.5, 3, 20, "r"), Measured(0.5, 95, 20, "r")


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (AdviceInputs(LOW, FAST), ()),
        (AdviceInputs(LOW, SLOW), ("95 s", "30 s", "checkpoint.every below 100")),
        (AdviceInputs(LOW, Measured(29, 2, 20, "r")), ("saves take 2 s", "steps 29 s", "30 s")),
        (AdviceInputs(sites.Site(preempt_mode="OFF"), SLOW), ()),
        (AdviceInputs(sites.Site(preempt_mode="SUSPEND"), SLOW), ()),
        (AdviceInputs(sites.Site(preempt_mode="CANCEL"), SLOW), ("95 s", "30 s")),
        (AdviceInputs(sites.Site(preempt_mode="CANCEL", grace=90), SLOW), ()),
        (AdviceInputs(limit=200, measured=SLOW), ("200 s", "start takes 20 s", "196 s")),
        (AdviceInputs(limit=218, measured=SLOW), ()),
        (AdviceInputs(limit=217, measured=SLOW), ("more than 4 minutes",)),
        (AdviceInputs(limit=60), ()),
        (AdviceInputs(LOW, returns=False), ("requeue.enabled is false",)),
        (AdviceInputs(returns=False), ()),
        (AdviceInputs(LOW, SLOW, limit=60, returns=False), ("requeue.enabled", "95 s", "60 s")),
    ],
)
def test_what_is_warned_of(facts: AdviceInputs, words: tuple[str, ...]) -> None:
    text = "\n".join(advice.warnings(facts))
    assert bool(text) == bool(words)
    assert all(word in text for word in words), text


def test_the_limit_is_the_jobs_or_the_partitions(site: Site) -> None:
    measured = advice.measured(earlier(site, save=10, start=300))
    # 300 + 3 steps + 2 * 11 + 5: five and a half minutes
    for rest, warned in (
        ("MaxTime=0:05:00", True),
        ("MaxTime=UNLIMITED", False),
        ("DefaultTime=0:05:00 MaxTime=UNLIMITED", True),
    ):
        slurm(site, partition=f"{PARTITION.replace('DefaultTime=NONE ', '')}{rest}")
        assert bool(advice.advise(site.plan(measured=measured))) is warned
    for asked in ("6", "5"):
        layer = Layer()
        layer.put("slurm.time", asked, "--time")
        assert bool(advice.advise(site.plan(layer, measured=measured))) is (asked == "5")


def test_the_signal_comes_in_time_for_what_was_measured(site: Site) -> None:
    slurm(site, CONFIG + SIGNALS)
    run = RunDir("/runs/toy-1")
    assert dict(site.plan().directives(run))["signal"] == "USR2@30"
    measured = advice.measured(earlier(site, save=95, step=2.5))
    plan = site.plan(measured=measured)
    assert dict(plan.directives(run))["signal"] == "USR2@200"  # twice of both, and 5 s
    layer = Layer()
    layer.put("slurm.signal", "USR1@60", "--sbatch")
    plan = site.plan(layer, measured=measured)
    assert dict(plan.directives(run))["signal"] == "USR1@60"


def test_a_lead_is_what_sbatch_takes() -> None:
    assert Measured(1e6, 1e6, 0).lead == 65535


def test_of_a_run_the_newest_attempt_with_figures_counts_without_its_first_step(
    site: Site,
) -> None:
    run = earlier(site, save=1, step=0.1, run="toy-1")
    earlier(site, save=9, step=0.4, start=33.0, number=2, run="toy-1")
    empty = ledger.life("5", 1)
    empty.number = 3
    run.attempt(3).path.mkdir()
    write_json(run.attempt(3).facts, asdict(empty))
    run.attempt(3).metrics.write_text('{"event": "train", "st')  # cut by a crash
    assert advice.measured(run) == Measured(0.4, 9.0, 33.0, "toy-1")


def test_a_run_without_figures_or_damaged_has_nothing_to_say(site: Site) -> None:
    run = earlier(site, save=1, run="toy-1")
    run.attempt(1).metrics.write_text('{"event": "train", "step": 1, "time": 5, "step_s": "x"}\n')
    assert advice.measured(run) is None
    run.attempt(1).facts.write_text("[")
    assert advice.measured(run) is None


def test_the_time_that_a_preemption_leaves_is_said(
    site: Site, hpcddp: Callable[..., Outcome]
) -> None:
    slurm(site)
    asked = ("submit", "toy", "--nodes", "1", "--gpus", "1", "--cluster", "slurm", "--dry-run")
    told = (
        "note: a preemption leaves 30 s for a step and a save (5 s of grace and 25 s of KillWait)"
    )
    assert told in hpcddp(*asked).err
    earlier(site, save=3.0, run="toy-20260101-0000-a")
    assert f"{told}; measured in toy-20260101-0000-a: 4 s" in hpcddp(*asked).err
    site.job("toy", "", TOY)
    planned = hpcddp("plan", "toy", "--nodes", "1", "--gpus", "1", "--cluster", "slurm")
    assert f"{told}; measured in toy-20260101-0000-a: 4 s" in planned.err
    slurm(site, partition="PartitionName=gpu Default=YES PreemptMode=OFF MaxTime=1:00:00")
    assert "preemption" not in hpcddp(*asked).err
