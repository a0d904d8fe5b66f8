"""Which nodes fail the checks at an attempt's start, and what follows."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lives import attempted, failing
from sites import Site

from hpcddp import record
from hpcddp.attempt import ledger
from hpcddp.attempt.nodes import bad_nodes, node_check, node_events, preflight
from hpcddp.rundir import RunDir, read_json, write_json

GOOD = {"time": 100.0, "gpus": 4, "faults": []}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, []),
        ({"gpus": 3}, ["has 3 of 4 GPUs"]),
        ({"gpus": None}, ["its GPU driver does not answer, as those of other nodes do"]),
        ({"time": 131.0}, ["its clock differs by +30 s"]),
        ({"time": 60.0}, ["its clock differs by -39 s"]),
        ({"time": 92.0}, []),
        ({"faults": ["/tmp is full"], "gpus": 2}, ["/tmp is full", "has 2 of 4 GPUs"]),
    ],
)
def test_a_node_is_judged_by_its_answer_and_the_others(
    changes: dict[str, object], said: list[str]
) -> None:
    rows = {"n1": GOOD, "n2": GOOD | changes}
    assert preflight.judged(rows, 99.0, 101.0, 4) == ({"n2": said} if said else {})


@pytest.mark.parametrize(
    ("gpus", "said"),
    [((1, 1), {}), ((4, -1), {}), ((8, 3), {"n2": ["has 3 of 7 GPUs"]})],
)
def test_slices_and_slow_drivers_are_no_missing_gpus(
    gpus: tuple[int, int], said: dict[str, list[str]]
) -> None:
    rows = {f"n{i + 1}": GOOD | {"gpus": count} for i, count in enumerate(gpus)}
    assert preflight.judged(rows, 99.0, 101.0, 7) == said


def test_what_most_nodes_have_is_no_fault_of_a_node(capfd: pytest.CaptureFixture[str]) -> None:
    faults = {f"n{i}": ["/tmp is full", f"its clock differs by +{i} s"] for i in (1, 2)}
    assert preflight._own(faults, 3) == {}
    assert "most nodes: /tmp is full, its clock differs" in capfd.readouterr().out
    assert preflight._own(faults, 4) == faults
    faults["n2"] = ["GPU 0 has uncorrected memory errors (1)"]
    assert preflight._own(faults, 2) == faults


def test_without_a_driver_anywhere_nobody_is_judged_by_gpus() -> None:
    rows = {name: GOOD | {"gpus": None} for name in ("n1", "n2")}
    assert preflight.judged(rows, 99.0, 101.0, 4) == {}
    assert preflight.judged({"n1": GOOD, "n2": GOOD | {"gpus": 0}}, 99.0, 101.0, 0) == {}


# srun as a program that runs the command for each node of --nodelist, one after the other.
SRUN = """\
hosts=; while [ $# -gt 0 ]; do
  case $1 in --nodelist=*) hosts=${1#*=} ;; /bin/sh) break ;; esac; shift; done
echo "$hosts" >>asked
for n in 1 2 3; do
  case $hosts in *[1-3]*$n*|n$n|"n[1-3]") SLURMD_NODENAME=n$n "$@" ;; esac
done
"""
BAD_GPU = """\
[ $SLURMD_NODENAME = n2 ] && errors=3 || errors=0
echo "A100, GPU-1, 550, 81920, $errors, 41, 0x0"
"""


@pytest.fixture
def launched() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def three_nodes(site: Site, monkeypatch: pytest.MonkeyPatch, **spec: object) -> RunDir:
    from hpcddp.submit import host_archive

    run, _ = failing(site, **spec)
    facts = read_json(run.attempt(1).facts) or {}
    facts |= {"nodes": "n[1-3]", "slurm": True, "job_id": "7", "cause": None}
    run.attempt(1).facts.write_text(json.dumps(facts))
    run.host.write_bytes(host_archive.build())
    site.program("srun", SRUN)
    site.program("nvidia-smi", BAD_GPU)
    site.program("sinfo", "echo 'n[1-9]|idle'")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "1")
    monkeypatch.setenv("PATH", os.environ["PATH"] + ":/usr/bin:/bin")
    return run


def test_a_node_that_fails_twice_ends_the_attempt(
    site: Site, monkeypatch: pytest.MonkeyPatch, launched: subprocess.Popen[bytes],
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run = three_nodes(site, monkeypatch)
    preflight.check(run, 1, launched.pid, "n1")
    assert launched.wait(5) == -signal.SIGTERM
    error = read_json(run.attempt(1).error) or {}
    assert (error["kind"], error["host"], error["bad_host"]) == ("node", "n2", True)
    assert "n2: GPU 0 has uncorrected memory errors (3)" in capfd.readouterr().out
    assert (site.folder / "asked").read_text().split() == ["n[1-3]", "n2"]


def test_a_job_without_gpus_uses_a_node_whose_gpu_is_bad(
    site: Site, monkeypatch: pytest.MonkeyPatch, launched: subprocess.Popen[bytes]
) -> None:
    run = three_nodes(site, monkeypatch, device="cpu")  # --procs
    monkeypatch.delenv("SLURM_GPUS_ON_NODE")
    preflight.check(run, 1, launched.pid, "n1")
    assert launched.poll() is None and not run.attempt(1).error.exists()
    assert not run.node_events.exists()  # other jobs use it too
    assert (site.folder / "asked").read_text().split() == ["n[1-3]"]


def test_another_jobs_gpu_is_no_fault_of_the_node(
    site: Site, monkeypatch: pytest.MonkeyPatch, launched: subprocess.Popen[bytes]
) -> None:
    run = three_nodes(site, monkeypatch)
    site.program("nvidia-smi", 'echo "A100, GPU-0, 550, 81920, 0, 41, 0x0"\n' + BAD_GPU)
    own = f"export CUDA_VISIBLE_DEVICES=$([ -e {site.folder}/bad ] && echo 1 || echo 0)\n"
    site.program("srun", own + SRUN)  # Slurm lists the job's GPUs in a step's environment
    preflight.check(run, 1, launched.pid, "n1")
    assert launched.poll() is None and not run.attempt(1).error.exists()
    (site.folder / "bad").touch()
    preflight.check(run, 1, launched.pid, "n1")
    assert "GPU 1 has uncorrected memory errors (3)" in run.attempt(1).error.read_text()


def test_the_ranks_go_on_if_no_other_node_can_take_the_place(
    site: Site, monkeypatch: pytest.MonkeyPatch, launched: subprocess.Popen[bytes],
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run = three_nodes(site, monkeypatch)
    site.program("sinfo", "echo 'n[2-3]|idle'")
    preflight.check(run, 1, launched.pid, "n1")
    assert launched.poll() is None and not run.attempt(1).error.exists()
    assert "the ranks continue: no other node" in capfd.readouterr().out
    lines = run.node_events.read_text().splitlines()
    event = next(node_events.read(lines))  # other jobs may avoid it
    assert (event.host, event.kind) == ("n2", "check") and "memory errors" in event.what


def test_a_node_that_is_back_is_used(
    site: Site, monkeypatch: pytest.MonkeyPatch, launched: subprocess.Popen[bytes],
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run = three_nodes(site, monkeypatch)
    run.attempt(1).error.write_text(json.dumps({"kind": "node", "host": "n2", "bad_host": True}))
    attempted(run, 2)
    facts = read_json(run.attempt(1).facts) or {}
    run.attempt(2).facts.write_text(json.dumps(facts | {"number": 2, "restarts": 1}))
    preflight.check(run, 2, launched.pid, "n1")
    assert launched.poll() is None
    assert "the ranks continue: Slurm gave n2 again" in capfd.readouterr().out


# Four GPUs, the last two with memory errors.
FOUR = "\n".join(f'echo "A100, GPU-{n}{n}, 550, 81920, {n // 2 * n}, 41, 0x0"' for n in range(4))
TWO = [f"GPU {n} has uncorrected memory errors ({n})" for n in (2, 3)]


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({}, TWO),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, []),
        ({"CUDA_VISIBLE_DEVICES": "1, 3"}, TWO[1:]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-00,GPU-22"}, TWO[:1]),
        ({"SLURM_STEP_GPUS": "0"}, []),
        ({"SLURM_STEP_GPUS": "4,5,6,7"}, TWO),  # of eight; the step sees its own four
        ({"SLURM_STEP_GPUS": "0,1", "CUDA_VISIBLE_DEVICES": "2"}, TWO[:1]),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, TWO),
        ({"CUDA_VISIBLE_DEVICES": "MIG-1a", "SLURM_STEP_GPUS": "1"}, []),
    ],
)
def test_only_the_jobs_gpus_count_where_slurm_names_them(
    site: Site, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], said: list[str]
) -> None:
    site.program("nvidia-smi", FOUR)
    for name in ("CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert gpu_faults(site, 2) == gpu_faults(site, None) == said
    assert gpu_faults(site, 0) == []


def gpu_faults(site: Site, wanted: int | None) -> list[str]:
    """What a node says of its GPUs."""
    run = RunDir(site.folder / "run")
    run.attempt(1).path.mkdir(parents=True, exist_ok=True)
    run.attempt(1).facts.touch()
    said = json.loads(node_check.answer(run, 1, "n1", node_check.boot_id(), wanted))
    return list(said["faults"])


# nvidia-smi fails if it has to ask a GPU that is lost, the fourth.
LOST = """\
gpus=0,1,2,3
for word in "$@"; do case $word in --id=*) gpus=${word#--id=} ;; esac; done
case $gpus in *3*) echo "GPU 0000:81:00.0 is lost"; exit 15 ;; esac
for gpu in ${gpus//,/ }; do echo "A100, GPU-$gpu$gpu, 550, 81920, $gpu, 41, 0x0"; done
"""


@pytest.mark.parametrize(
    ("visible", "said"),
    [
        ("", ["nvidia-smi fails: GPU 0000:81:00.0 is lost"]),
        ("0,3", ["nvidia-smi fails: GPU 0000:81:00.0 is lost"]),
        ("0", []),
        ("0,2", ["GPU GPU-22 has uncorrected memory errors (2)"]),
    ],
)
def test_a_lost_gpu_of_another_job_is_no_fault(
    site: Site, monkeypatch: pytest.MonkeyPatch, visible: str, said: list[str]
) -> None:
    site.program("nvidia-smi", LOST)
    monkeypatch.delenv("SLURM_STEP_GPUS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_faults(site, 2) == said
    assert gpu_faults(site, 0) == []


def test_a_node_tells_its_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(tmp_path / "run")
    run.attempt(1).path.mkdir(parents=True)
    monkeypatch.setattr(node_check, "VISIBLE", 0.1)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none0")
    monkeypatch.setenv("SLURMD_NODENAME", "n5")
    said = json.loads(node_check.answer(run, 1, "127.0.0.1", "of another machine"))
    assert said["host"] == "n5"
    words = ("does not see the attempt", "interface none0 is missing", "to itself")
    for text, word in zip(said["faults"], words, strict=True):
        assert word in text
    run.attempt(1).facts.touch()
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert json.loads(node_check.answer(run, 1, "n1", node_check.boot_id()))["faults"] == []
    assert [path.name for path in run.attempt(1).path.iterdir()] == ["attempt.json"]


def test_a_spare_that_fails_is_not_used_and_the_attempt_goes_on(
    site: Site, monkeypatch: pytest.MonkeyPatch, launched: subprocess.Popen[bytes],
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run = three_nodes(site, monkeypatch, spares=1)
    run.attempt(1).hosts.write_text('{"in_order": ["n1", "n3"]}')
    preflight.check(run, 1, launched.pid, "n1")
    assert launched.poll() is None and not run.attempt(1).error.exists()
    assert "memory errors (3); not used as a spare" in capfd.readouterr().out
    mine = ledger.read(run.attempt(1))
    assert mine and bad_nodes.barred(run, record.read(run), mine) == ["n2"]


def test_a_spare_counts_as_another_node(
    site: Site, monkeypatch: pytest.MonkeyPatch, launched: subprocess.Popen[bytes]
) -> None:
    run = three_nodes(site, monkeypatch, spares=1, requeue={"here": True})
    job = read_json(run.job) or {}
    write_json(run.job, {**job, "launcher": "fork"})
    run.attempt(1).hosts.write_text('{"in_order": ["n1", "n2"]}')
    site.program("sinfo", "echo 'n[1-3]|idle'")  # no node outside of the job
    preflight.check(run, 1, launched.pid, "n1")
    assert launched.wait(5) == -signal.SIGTERM
