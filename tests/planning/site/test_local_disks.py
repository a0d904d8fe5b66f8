"""Folders on a disk of this machine, which the nodes may not see."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from hpcddp.planning.site import local_disks
from hpcddp.rundir import RunDir, write_json
from hpcddp.slurm.node_kinds import NodeKind
from hpcddp.spec import JobSpec

KINDS = [NodeKind("gpu", True, 2, 8, 1, 1000, (), (), "n[1-2]")]
SHARED = {"/": "ext4", "/home": "nfs4", "/scratch": "lustre", "/data": "xfs"}


@pytest.fixture
def mounted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_disks, "mounts", lambda: SHARED)
    monkeypatch.setattr("sys.prefix", "/home/ada/venv")


def said(runs: str | Path, job: JobSpec | None = None, environ: Iterable[str] = ()) -> list[str]:
    rows = local_disks.warnings(
        job or JobSpec(), Path("/home/ada"), Path(runs), KINDS, dict.fromkeys(environ, "x")
    )
    return list(rows)


def test_the_type_of_the_file_system_tells(mounted: None) -> None:
    assert said("/scratch/ada/runs") == said("/home/ada/runs") == []
    assert said("/var/runs") == [
        "the nodes may not see the folder of the runs: /var/runs is on a disk of this machine "
        "(ext4, mounted at /)"
    ]


def test_environment_and_working_folder_count(
    mounted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.prefix", "/data/venv")
    (only,) = said("/home/ada/runs")
    assert "the Python environment: /data/venv is on a disk of this machine (xfs, " in only
    job = JobSpec(command=["python", "train.py"])
    assert said("/home/ada/runs", job) == [only]


def test_where_nodes_have_seen_the_folder_nothing_is_said(mounted: None, tmp_path: Path) -> None:
    assert len(said(tmp_path)) == 1
    run = RunDir(tmp_path / "toy-1")
    run.attempt(1).path.mkdir(parents=True)
    run.job.write_text("{}")
    write_json(run.attempt(1).facts, {"slurm": False})
    assert len(said(tmp_path)) == 1  # a run of this machine
    write_json(run.attempt(1).facts, {"slurm": True})
    assert said(tmp_path) == []


def test_on_a_sandbox_the_nodes_are_this_machine(mounted: None) -> None:
    assert said("/var/runs", environ=["HPCDDP_SANDBOX"]) == []


def test_the_mounts_of_this_machine_are_read() -> None:
    assert local_disks.mounts()["/proc"] == "proc"
