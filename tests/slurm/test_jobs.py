"""Whole jobs on the real Slurm: submitted, rendered, followed, stopped, cancelled, resumed."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from toy import TOY

from .conftest import Slurm
from .desk import HPCDDP, LONG, Desk, make_toy, wait_for


@pytest.mark.smoke("plain sbatch")
def test_submit_and_render_run_the_same_job(desk: Desk, pytestconfig: pytest.Config) -> None:
    gpus = 4 if pytestconfig.getoption("--full") else 2
    size, last_rank = ("--nodes", "2", "--gpus", str(gpus)), 2 * gpus - 1
    out = desk("submit", "toy", *size, "--follow", "--json").splitlines()
    first, last = json.loads(out[0]), json.loads(out[-1])
    assert set(first) == {"run", "job_id", "path", "schema_version"}
    assert (last["state"], last["step"], last["hosts"]) == ("COMPLETED", 12, desk.hosts(2))
    log = desk("logs", first["run"], "--rank", str(last_rank)).splitlines()
    lines = [line for line in log if "[c10d]" not in line]  # torch warns of hosts without a name
    assert lines
    for line in lines:
        assert line.startswith(f"{last_rank}: ")
        assert f"rank {last_rank}({2 * gpus}), node 1(2), local {gpus - 1}({gpus})" in line
        assert f"on {desk.nodes[1]}" in line

    rendered = desk.render(*size)
    script = rendered.script.read_text()
    job = desk.slurm.run("sbatch", "--parsable", input=script, cwd=desk.folder).stdout.strip()
    waits = ("PENDING", "RUNNING", "RENDERED", "COMPLETING")
    ended = desk.until(lambda s: s["state"] not in waits, rendered.name)
    assert (ended["state"], ended["job_id"], ended["step"]) == ("COMPLETED", job, 12)
    assert desk.status()["run"] == rendered.name != first["run"]
    submitted = (Path(first["path"]) / "job.sbatch").read_text().replace(first["run"], "RUN")
    assert unmade(submitted) == unmade(script.replace(ended["run"], "RUN"))


def unmade(script: str) -> list[str]:
    """A script's lines but for the one that says by which command it was made."""
    return [line for line in script.splitlines() if not line.startswith("# Made by ")]


@pytest.mark.smoke("submit", quick=True)
def test_rank_map_is_gathered_from_the_ranks(desk: Desk) -> None:
    run = desk.submit("--nodes", "2", "--gpus", "2", "--follow")
    folder = Path(desk.status(run)["path"])
    records = [
        json.loads(x) for x in (folder / "attempts/1/metrics.jsonl").read_text().splitlines()
    ]
    rows = [(r["rank"], r["node"], r["local"], r["host"]) for r in records[0]["ranks"]]
    one, two, *_ = desk.nodes
    assert rows == [(0, 0, 0, one), (1, 0, 1, one), (2, 1, 0, two), (3, 1, 1, two)]


def test_wrong_distribution_is_refused(desk: Desk) -> None:
    (desk.folder / "cyclic.sh.j2").write_text(
        '{% extends "slurm.sh.j2" %}{% block launch %}'
        'srun --distribution=cyclic --label --kill-on-bad-exit=1 "${COMMAND[@]}" &\n{% endblock %}'
    )
    once = ("--set", "requeue.crashes=1")
    run = desk.submit("--nodes", "2", "--gpus", "2", "--template", "cyclic.sh.j2", *once)
    ended = desk.until(lambda s: s["state"] == "FAILED", run)
    assert "RankMapError" in ended["reason"]
    assert "rank 1" in ended["reason"] or "rank 2" in ended["reason"]
    assert ended["step"] == 0


def test_second_sbatch_leaves_while_the_first_lives_and_continues_after_it(desk: Desk) -> None:
    rendered = desk.render(*LONG, "--set", "checkpoint.every=5", "--gpus", "1")
    script = rendered.script
    first = desk.sbatch(script)
    desk.until(lambda s: s["state"] == "RUNNING" and s["step"] >= 5, rendered.name)
    second = desk.sbatch(script)
    log = script.with_name(f"job-{second}.log")
    while not (log.exists() and "is already running this run" in log.read_text()):
        time.sleep(0.1)
    assert desk.status()["job_id"] == first
    desk("stop", "last")
    stopped = desk.until(lambda s: s["state"] == "STOPPED")
    third = desk.sbatch(script)
    going = desk.until(lambda s: s["state"] == "RUNNING" and s["step"] > stopped["step"])
    assert (going["job_id"], going["attempt"]) == (third, 2)
    desk("cancel", "last")
    desk.until(lambda s: s["state"] == "CANCELLED")


def without_sinfo(desk: Desk) -> Desk:
    """A user whose sinfo does not answer."""
    program = desk.folder / "bin" / "sinfo"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    path = {"PATH": f"{program.parent}:{desk.slurm.environ['PATH']}"}
    return replace(desk, slurm=replace(desk.slurm, environ=desk.slurm.environ | path))


def test_commands_in_every_state(desk: Desk) -> None:
    """status, ls, cancel and stop on pending, running, ended and cancelled jobs."""

    def looks(run: str, state: str) -> None:
        assert state in desk("status", run)
        assert json.loads(desk("status", run, "--json"))["state"] == state
        assert state in desk("ls")
        rows = {r["run"]: r["state"] for r in json.loads(desk("ls", "--json"))["runs"]}
        assert rows[run] == state

    pending = desk.submit("--sbatch", "hold=true")
    found = desk.until(lambda s: s["state"] == "PENDING" and bool(s["reason"]), pending)
    assert found["reason"].startswith("JobHeldUser: ") and found["since"]
    looks(pending, "PENDING")
    desk("stop", pending)
    desk.until(lambda s: s["state"] in ("CANCELLED", "STOPPED"), pending)

    more = str(len(desk.nodes) + 1)
    blind = without_sinfo(desk)  # else hpcddp refuses what Slurm would never start
    never = blind.result("submit", "--json", "--no-snapshot", "--nodes", more, "--", "true")
    assert never.returncode == 0 and never.stderr.count("PENDING") == 0  # as a program reads it
    said = blind.result("submit", "--no-snapshot", "--nodes", more, "--", "true").stderr
    assert " is PENDING: Partition" in said and "--nodes" in said, said
    for run in ("last", json.loads(never.stdout)["run"]):
        desk("cancel", run)

    cancelled = desk.submit("--sbatch", "hold=true")
    desk("cancel", cancelled, "--json")
    desk.until(lambda s: s["state"] == "CANCELLED", cancelled)
    looks(cancelled, "CANCELLED")
    for verb in ("stop", "cancel"):
        desk(verb, cancelled, "--json", code=2)

    running = desk.submit(*LONG)
    desk.until(lambda s: s["state"] == "RUNNING" and s["step"] > 0, running)
    looks(running, "RUNNING")
    assert json.loads(desk("stop", running, "--json"))["asked"] == "stop"
    desk.until(lambda s: s["state"] == "STOPPED", running)
    looks(running, "STOPPED")
    for verb in ("stop", "cancel"):
        desk(verb, running, code=2)

    killed = desk.submit(*LONG)
    desk.until(lambda s: s["state"] == "RUNNING" and s["step"] > 0, killed)
    desk("cancel", killed)
    desk.until(lambda s: s["state"] == "CANCELLED", killed)
    looks(killed, "CANCELLED")


def test_a_cluster_of_three_nodes_is_one_toml_file(desk: Desk) -> None:
    (desk.folder / "three.toml").write_text(
        'description = "three nodes"\nnodes = 3\ngpus_per_node = 4\ncpus_per_gpu = 1\n'
        '[slurm]\npartition = "high"\n[env]\nTHREE = "3"\n'
    )
    asked = ("--cluster", "./three.toml", "--set", "global_batch=12")
    refused = desk.result("submit", "toy", "--nodes", "4", *asked)
    assert refused.returncode == 2 and "4 nodes" in refused.stderr and "has 3" in refused.stderr
    assert not (desk.folder / "runs").exists()
    desk("submit", "toy", "--nodes", "3", *asked, "--follow")
    found = desk.status()
    assert (found["state"], found["hosts"]) == ("COMPLETED", desk.hosts(3))
    rows = desk.slurm.run("squeue", "--states=all", "--noheader", "--format=%i %P").stdout
    assert f"{found['job_id']} high" in rows.splitlines()


def test_export_is_what_a_plain_model_loads(desk: Desk) -> None:
    desk.submit("--gpus", "2", "--follow")
    desk("export", "last", "model.pt")
    load = (
        "import torch; m = torch.nn.Linear(4, 2); "
        "print(m.load_state_dict(torch.load('model.pt', weights_only=True)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", load], cwd=desk.folder, capture_output=True, text=True, check=True
    )
    assert "All keys matched" in done.stdout


def test_refused_by_sbatch(desk: Desk) -> None:
    done = desk.result("submit", "toy", "--sbatch", "partition=nowhere")
    assert done.returncode == 1
    assert "invalid partition" in done.stderr and "job.sbatch" in done.stderr
    found = desk.status()
    assert found["state"] == "REFUSED" and "invalid partition" in found["reason"]


def test_refused_for_nodes_that_are_not_there(desk: Desk) -> None:
    """Slurm keeps a failed job of that name: it is no job of ours."""
    done = desk.result("submit", "toy", "--sbatch", "mincpus=100000")
    assert done.returncode == 1
    assert "Requested node configuration is not available" in done.stderr
    assert desk.status()["state"] == "REFUSED"


def test_an_answer_of_sbatch_that_is_lost(desk: Desk) -> None:
    """The job exists: it is found by its name, once, and runs to its end."""
    sbatch = desk.slurm.run("sh", "-c", "command -v sbatch", check=True).stdout.strip()
    (desk.folder / "bin").mkdir()
    wrapper = desk.folder / "bin/sbatch"
    wrapper.write_text(
        f'#!/bin/sh\ncase "$*" in *job.sbatch*) {sbatch} "$@" >/dev/null\n'
        "echo 'sbatch: error: Batch job submission failed: Socket timed out' >&2; exit 1;;\n"
        f'esac\nexec {sbatch} "$@"\n'
    )
    wrapper.chmod(0o755)
    path = f"{wrapper.parent}:{desk.slurm.environ['PATH']}"
    done = desk.slurm.run(
        HPCDDP, "submit", "toy", "--follow", "--json", cwd=desk.folder, timeout=100,
        env=desk.slurm.environ | {"PATH": path},
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, found["state"]) == (0, "COMPLETED"), done.stdout + done.stderr
    jobs = desk.slurm.run("squeue", "--states=all", "--noheader", f"--name={found['run']}").stdout
    assert len(jobs.splitlines()) == 1


def test_requeued_by_hand_it_waits_and_is_not_resumed_twice(desk: Desk) -> None:
    run = desk.submit(*LONG, "--set", "checkpoint.every=5")
    job = desk.until(lambda s: s["state"] == "RUNNING" and s["step"] > 5, run)["job_id"]
    desk.slurm.run("scontrol", "requeue", job, check=True)
    holder = desk.take_all_nodes(600)  # else it waits for some seconds only
    waits = desk.until(lambda s: s["state"] == "PENDING", run)
    assert waits["job_id"] == job
    assert desk.result("resume", run).returncode == 2
    desk.slurm.run("scancel", holder, check=True)
    again = desk.until(lambda s: s["state"] == "RUNNING" and s["attempt"] == 2, run)
    assert again["job_id"] == job
    desk.training(run, attempt=2)
    wait_for(lambda: "resumed from checkpoints/" in desk("logs", run, "--attempt", "2"))
    desk.slurm.run("scancel", job, check=True)
    desk.until(lambda s: s["state"] == "CANCELLED", run)


@pytest.mark.full
def test_the_time_limit_is_told(desk: Desk) -> None:
    run = desk.submit(*LONG, "--time", "1", "--set", "requeue.enabled=false")
    deadline = time.monotonic() + 150
    while desk.status(run)["state"] in ("PENDING", "RUNNING", "COMPLETING"):
        assert time.monotonic() < deadline
        time.sleep(1)
    assert desk.status(run)["state"] == "TIMEOUT"


def test_a_killed_rank_is_named_and_not_its_neighbour(desk: Desk) -> None:
    run = desk.submit("--gpus", "2", *LONG, "--set", "requeue.enabled=false")
    found = desk.until(lambda s: s["state"] == "RUNNING" and s["step"] > 0, run)
    metrics = Path(found["path"], "attempts/1/metrics.jsonl").read_text().splitlines()
    os.kill(json.loads(metrics[0])["ranks"][1]["pid"], signal.SIGKILL)
    ended = desk.until(lambda s: s["state"] == "FAILED", run)
    killed = f"rank 1 on {desk.nodes[0]} was killed: out of memory?"
    assert ended["reason"] == f"{killed}; requeue.enabled is false"


def test_dry_run_gives_slurms_verdict_and_leaves_nothing(desk: Desk) -> None:
    good = desk.result("submit", "toy", "--nodes", "2", "--gpus", "2", "--dry-run")
    assert good.returncode == 0 and "accepted" in good.stderr
    assert "#SBATCH --nodes=2" in good.stdout and "rank" in good.stdout
    bad = desk.result("submit", "toy", "--sbatch", "partition=nowhere", "--dry-run")
    assert bad.returncode == 1 and "refused" in bad.stderr
    assert not (desk.folder / "runs").exists()


def test_submitting_from_inside_another_job(desk: Desk) -> None:
    """Ranks, bindings and devices of the outer job do not reach the inner one."""
    inner = f"{HPCDDP} submit toy --nodes 2 --gpus 2 --parsable > inner"
    outer = f"#!/bin/sh\n#SBATCH --ntasks=1 --gpus-per-node=1\nsrun sh -c '{inner}'\n"
    env = {**desk.slurm.environ, "RANK": "3", "WORLD_SIZE": "5", "SLURM_CPU_BIND": "mask_cpu:0x1"}
    desk.slurm.run("sbatch", "--wait", input=outer, cwd=desk.folder, env=env, check=True)
    job = (desk.folder / "inner").read_text().strip()
    ended = desk.until(lambda s: s["state"] == "COMPLETED", job)
    assert (ended["step"], ended["gpus_per_node"]) == (12, 2)


ODD_NAMES = ['it\'s a "b" #1;touch x', "100% $(touch x) größe"]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_folders_of_any_name(slurm: Slurm, tmp_path: Path, name: str) -> None:
    """What sbatch, bash and the file system make of a path is what was meant."""
    make_toy(tmp_path / name)
    desk = Desk(tmp_path / name, slurm)
    out = desk(
        "submit", "toy", "--set", "max_steps=1", "--env", f"ODD={name}", "--follow", "--json"
    )
    found = json.loads(out.splitlines()[-1])
    assert found["state"] == "COMPLETED", desk("logs")
    run = Path(found["path"])
    assert run.parent == tmp_path / name / "runs"
    assert (run / f"job-{found['job_id']}.log").exists()
    assert not list(tmp_path.rglob("x"))


def test_dataset_smaller_than_the_world_is_told_by_status(desk: Desk) -> None:
    run = desk.submit("--gpus", "4", "--set", "dataset.size=3")
    ended = desk.until(lambda s: s["state"] == "FAILED", run)
    assert "3 samples" in ended["reason"]


def test_status_without_a_controller_is_the_last_known_state(desk: Desk) -> None:
    run = desk.submit(*LONG)
    desk.until(lambda s: s["state"] == "RUNNING" and s["step"] > 0, run)
    desk.slurm.sandbox.stop_daemon("slurmctld")
    try:
        done = desk.result("status", run, "--json")
        assert done.returncode == 3
        found = json.loads(done.stdout)
        assert found["stale"] and found["state"] == "RUNNING"
        assert done.stderr == ""  # JSON says it once
        assert desk.result("submit", "toy").returncode == 3
    finally:
        desk.slurm.sandbox.start_daemon("slurmctld")
    desk.until(lambda s: s["state"] == "RUNNING" and not s["stale"], run)
    desk("cancel", run)


def test_a_failing_rank_is_named(desk: Desk) -> None:
    (desk.folder / "jobs/toy.py").write_text(
        TOY
        + "\nimport os\nif os.environ.get('SLURM_PROCID') == '2': raise ValueError('rank two')\n"
    )
    once = ("--set", "requeue.crashes=1")  # of one rank alone, it may be its node's
    done = desk.result("submit", "toy", "--nodes", "2", "--gpus", "2", "--follow", *once)
    assert done.returncode == 1
    assert f"rank 2 on {desk.nodes[1]}: ValueError: rank two" in done.stderr
    assert done.stdout.count("Traceback") == 1
