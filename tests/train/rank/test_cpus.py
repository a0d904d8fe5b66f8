"""CPUs of a rank: what binds it, what limits it, and what they do."""

import os
from pathlib import Path

import pytest
import torch

from hpcddp.train.rank import cpus
from hpcddp.train.rank.cpus import divide, quota, share


@pytest.mark.parametrize(
    ("count", "device", "workers", "threads"),
    [
        (1, "cpu", 0, 1),
        (2, "cpu", 0, 2),
        (4, "cpu", 1, 3),
        (16, "cpu", 4, 12),
        (128, "cpu", 4, 124),
        (1, "cuda", 0, 1),
        (2, "cuda", 1, 1),
        (8, "cuda", 7, 1),
        (9, "cuda", 8, 1),
        (72, "cuda", 8, 64),
    ],
)
def test_readers_and_threads_together_are_the_cpus(
    count: int, device: str, workers: int, threads: int
) -> None:
    assert divide(count, device) == (count, workers, threads)


def test_what_somebody_asks_for_is_what_reads() -> None:
    assert divide(8, "cpu", 0) == (8, 0, 8)
    assert divide(8, "cuda", 3) == (8, 3, 5)
    assert divide(2, "cpu", 5) == (2, 5, 1)


def test_threads_are_lowered_and_never_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    has = [4]
    monkeypatch.setattr(torch, "get_num_threads", lambda: has[-1])
    monkeypatch.setattr(torch, "set_num_threads", has.append)
    assert cpus.limit_threads(8) == 4 and has == [4]
    assert cpus.limit_threads(3) == 3 and has == [4, 3]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_quota_of_cgroup_v2_is_the_least_on_the_way_to_the_root(tmp_path: Path) -> None:
    write(proc := tmp_path / "cgroup", "0::/system/job_7/task\n")
    groups = tmp_path / "fs"
    write(groups / "system" / "job_7" / "task" / "cpu.max", "max 100000\n")
    assert quota(proc, groups) is None
    write(groups / "system" / "cpu.max", "800000 100000\n")
    write(groups / "system" / "job_7" / "cpu.max", "350000 100000\n")
    assert quota(proc, groups) == [str(groups / "system" / "job_7"), 3.5]


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    write(proc := tmp_path / "cgroup", "0::/docker/0123abc\n")
    write(tmp_path / "fs" / "cpu.max", "200000 100000\n")
    assert quota(proc, tmp_path / "fs") == [str(tmp_path / "fs"), 2.0]


@pytest.mark.parametrize("mounted", ["cpu", "cpu,cpuacct"])
def test_a_quota_of_cgroup_v1(tmp_path: Path, mounted: str) -> None:
    write(
        proc := tmp_path / "cgroup",
        "9:name=systemd:/\n4:memory:/slurm\n1:cpu,cpuacct:/slurm/job:8\n0::/\n",
    )
    folder = tmp_path / "fs" / mounted / "slurm" / "job:8"
    write(folder / "cpu.cfs_quota_us", "-1\n")
    write(folder / "cpu.cfs_period_us", "100000\n")
    assert quota(proc, tmp_path / "fs") is None
    write(folder / "cpu.cfs_quota_us", "150000\n")
    assert quota(proc, tmp_path / "fs") == [str(folder), 1.5]


def test_where_nobody_tells_there_is_no_quota(tmp_path: Path) -> None:
    assert quota(tmp_path / "cgroup", tmp_path) is None
    write(tmp_path / "odd", "0::/a\n")
    write(tmp_path / "a" / "cpu.max", "what\n")
    assert quota(tmp_path / "odd", tmp_path) is None


def report(host: str, bound: str, limit: list[object] | None = None) -> dict[str, object]:
    return {"host": host, "cpus": bound, "quota": limit}


@pytest.mark.parametrize(
    ("reports", "cpus"),
    [
        ([], 8),
        ([report("a", "0-7")], 8),
        ([report("a", "0-7"), report("a", "0-7"), report("b", "0-7")], 4),
        ([report("a", "0-7"), report("a", "8-15")], 8),  # each is bound to its own
        ([report("a", "0-7")] * 16, 1),
        ([report("a", "0-7", ["/job", 3.5])], 3),
        ([report("a", "0-7", ["/job", 3.5]), report("a", "8-15", ["/job", 3.5])], 1),
        ([report("a", "0-7", ["/one", 3.0]), report("a", "8-15", ["/two", 3.0])], 3),
        ([report("a", "0-7", ["/job", 0.5])], 1),
    ],
)
def test_ranks_of_a_node_share_what_is_not_their_own(
    monkeypatch: pytest.MonkeyPatch, reports: list[dict[str, object]], cpus: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert share(reports, 0) == cpus
