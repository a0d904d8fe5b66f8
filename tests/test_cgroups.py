"""What cgroups of both versions tell of memory."""

from pathlib import Path

import pytest

from hpcddp import cgroups
from hpcddp.cgroups import memory_left


def write(folder: Path, **facts: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in facts.items():
        (folder / f"memory.{name}").write_text(text)


def test_the_tightest_group_of_version_2_counts(tmp_path: Path) -> None:
    """What the kernel can drop at any time is free."""
    (tmp_path / "cgroup").write_text("0::/job/step\n")
    step, job = tmp_path / "fs" / "job" / "step", tmp_path / "fs" / "job"
    write(step, max="max\n", current="700\n", stat="anon 400\ninactive_file 100\n")
    assert memory_left(tmp_path / "cgroup", tmp_path / "fs") == float("inf")
    write(job, max="1000\n", current="800\n", stat="anon 500\ninactive_file 100\n")
    assert memory_left(tmp_path / "cgroup", tmp_path / "fs") == 300


@pytest.mark.parametrize("limit", [2000, 9223372036854771712])
def test_so_it_does_in_version_1(tmp_path: Path, limit: int) -> None:
    (tmp_path / "cgroup").write_text("4:memory:/job\n1:cpu:/\n0::/\n")
    write(tmp_path / "fs" / "memory" / "job", limit_in_bytes=f"{limit}\n",
          usage_in_bytes="1500\n", stat="total_inactive_file 500\n")  # fmt: skip
    assert memory_left(tmp_path / "cgroup", tmp_path / "fs") == float(limit - 1000)


def test_where_nobody_tells_there_is_no_limit(tmp_path: Path) -> None:
    assert memory_left(tmp_path / "cgroup", tmp_path) == float("inf")


@pytest.mark.parametrize(
    ("line", "folder", "file"),
    [
        ("0::/job/step", "job/step", "memory.events"),
        ("5:memory:/job/step", "memory/job/step", "memory.oom_control"),
    ],
)
def test_the_kernels_kills_in_the_own_group_count(
    tmp_path: Path, line: str, folder: str, file: str
) -> None:
    proc, root = tmp_path / "cgroup", tmp_path / "sys"
    proc.write_text(f"{line}\n")
    assert cgroups.oom_kills(proc, root) == 0
    (root / folder).mkdir(parents=True)
    (root / folder / file).write_text("low 0\noom 3\noom_kill 2\n")
    (root / folder).parent.joinpath(file).write_text("oom_kill 7\n")
    assert cgroups.oom_kills(proc, root) == 2
