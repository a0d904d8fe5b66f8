"""Warnings before a job is submitted: from what its earlier runs took, and what Slurm says."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from earlier import earlier_run
from sites import Outcome, Site
from toy_model import TOY

from hpcddp.planning import advice, earlier_runs
from hpcddp.planning.advice import AdviceInputs
from hpcddp.planning.earlier_runs import Measured
from hpcddp.planning.jobfile import Layer
from hpcddp.planning.plan import Plan
from hpcddp.rundir import RunDir
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


def test_a_save_that_cannot_fit_is_told_and_nothing_is_refused(
    site: Site, hpcddp: Callable[..., Outcome]
) -> None:
    slurm(site)
    run = earlier_run(site, save=95)
    for command in (["submit", "--dry-run"], ["render"]):
        done = hpcddp(*command, "toy", "--cluster", "slurm")
        assert done.code == 0
        warned = [line for line in done.err.splitlines() if line.startswith("warning: ")]
        assert len(warned) == 1
        assert "a preemption leaves 30 s, but a save takes 95 s" in warned[0]
        assert run.name in warned[0]
        assert "warning" not in done.out


def test_resume_goes_by_the_run_itself(site: Site, hpcddp: Callable[..., Outcome]) -> None:
    slurm(site)
    slow = earlier_run(site, save=95, run="toy-slow")
    earlier_run(site, save=1, run="toy-newer")
    assert "warning" not in hpcddp("submit", "--dry-run", "toy", "--cluster", "slurm").err
    done = hpcddp("resume", slow.name, "--detach")
    assert "but a save takes 95 s" in done.err


def test_other_jobs_and_other_machines_say_nothing(
    site: Site, hpcddp: Callable[..., Outcome]
) -> None:
    slurm(site)
    earlier_run(site, save=95, name="toy-2")
    earlier_run(site, save=95, backend="local")
    assert "warning" not in hpcddp("submit", "--dry-run", "toy", "--cluster", "slurm").err


def test_nothing_is_said_where_slurm_is_silent_or_nothing_was_measured(site: Site) -> None:
    slurm(site)
    assert advice.advise(site.plan()) == []
    plan = site.plan(measured=earlier_runs.measured(earlier_run(site, save=95)))
    assert len(advice.advise(plan)) == 1
    assert advice.advise(replace(plan, site=None)) == []


LOW = sites.Site(preempt_mode="REQUEUE", grace=5, kill_wait=25)
FAST, SLOW = Measured(0.5, 3, 20, "r"), Measured(0.5, 95, 20, "r")
START = Measured(0.0, 0.0, 400, "r")  # of a command that records nothing else


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (AdviceInputs(LOW, FAST), ()),
        (AdviceInputs(LOW, SLOW), ("95 s", "30 s", "checkpoint.every below 100")),
        (AdviceInputs(LOW, Measured(29, 2, 20, "r")), ("save takes 2 s", "step 29 s", "30 s")),
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
        (AdviceInputs(measured=Measured(0.5, 3, 119, "r")), ()),
        (AdviceInputs(measured=Measured(0.5, 3, 180, "r")), ("start takes 180 s (in r)", "doctor")),
        (AdviceInputs(measured=START), ("start takes 400 s (in r)", "doctor")),
        (AdviceInputs(imported=29.0), ()),
        (
            AdviceInputs(imported=90.0),
            ("import of torch took 90 s in `hpcddp doctor`", "container"),
        ),
        (AdviceInputs(LOW, SLOW, limit=60, returns=False), ("requeue.enabled", "95 s", "60 s")),
    ],
)
def test_what_is_warned_of(facts: AdviceInputs, words: tuple[str, ...]) -> None:
    text = "\n".join(advice.warnings(facts))
    assert bool(text) == bool(words)
    assert all(word in text for word in words), text


def test_a_start_alone_says_nothing_of_saves_and_of_progress() -> None:
    (text,) = advice.warnings(AdviceInputs(LOW, START, limit=60))
    assert text.startswith("the start takes 400 s")
    assert advice.room(LOW, START) == advice.room(LOW)


def no_progress(plan: Plan) -> bool:
    """Whether the limit ends each attempt before it makes progress, as the advice has it."""
    return any("will make no progress" in text for text in advice.advise(plan))


def test_the_limit_is_the_jobs_or_the_partitions(site: Site) -> None:
    measured = earlier_runs.measured(earlier_run(site, save=10, start=300))
    # 300 + 3 steps + 2 * 11 + 5: five and a half minutes
    for rest, warned in (
        ("MaxTime=0:05:00", True),
        ("MaxTime=UNLIMITED", False),
        ("DefaultTime=0:05:00 MaxTime=UNLIMITED", True),
    ):
        slurm(site, partition=f"{PARTITION.replace('DefaultTime=NONE ', '')}{rest}")
        assert no_progress(site.plan(measured=measured)) is warned
    for asked in ("6", "5"):
        layer = Layer()
        layer.put("slurm.time", asked, "--time")
        assert no_progress(site.plan(layer, measured=measured)) is (asked == "5")


def test_the_signal_comes_in_time_for_what_was_measured(site: Site) -> None:
    slurm(site, CONFIG + SIGNALS)
    run = RunDir("/runs/toy-1")
    assert dict(site.plan().directives(run))["signal"] == "USR2@30"
    measured = earlier_runs.measured(earlier_run(site, save=95, step=2.5))
    plan = site.plan(measured=measured)
    assert dict(plan.directives(run))["signal"] == "USR2@200"  # twice of both, and 5 s
    layer = Layer()
    layer.put("slurm.signal", "USR1@60", "--sbatch")
    plan = site.plan(layer, measured=measured)
    assert dict(plan.directives(run))["signal"] == "USR1@60"


def test_the_time_that_a_preemption_leaves_is_said(
    site: Site, hpcddp: Callable[..., Outcome]
) -> None:
    slurm(site)
    asked = ("submit", "toy", "--nodes", "1", "--gpus", "1", "--cluster", "slurm", "--dry-run")
    note = "note: a preemption leaves 30 s for a step and a save (GraceTime 5 s + KillWait 25 s)"
    assert note in hpcddp(*asked).err
    earlier_run(site, save=3.0, run="toy-20260101-0000-a")
    assert f"{note}; toy-20260101-0000-a needed 4 s" in hpcddp(*asked).err
    site.job("toy", "", TOY)
    planned = hpcddp("plan", "toy", "--nodes", "1", "--gpus", "1", "--cluster", "slurm")
    assert f"{note}; toy-20260101-0000-a needed 4 s" in planned.err
    slurm(site, partition="PartitionName=gpu Default=YES PreemptMode=OFF MaxTime=1:00:00")
    assert "preemption" not in hpcddp(*asked).err
