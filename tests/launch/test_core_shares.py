"""The CPUs of the ranks that one process starts."""

import os
from pathlib import Path

import pytest

from hpcddp.launch.core_shares import shares


def machine(root: Path, sockets: int, cores: int, *, numbered: str) -> Path:
    """A machine with two threads per core and one NUMA node per socket.

    Args:
        numbered: "apart", if the second threads follow after all first ones; "together", if both
            threads of a core have neighbouring numbers; "in turn", if cores alternate between
            sockets.
    """
    total = sockets * cores
    for core in range(total):
        pair = (2 * core, 2 * core + 1) if numbered == "together" else (core, core + total)
        socket = core % sockets if numbered == "in turn" else core // cores
        for cpu in pair:
            folder = root / f"cpu{cpu}"
            (folder / "topology").mkdir(parents=True)
            (folder / f"node{socket}").mkdir()
            (folder / "topology/thread_siblings_list").write_text("{},{}\n".format(*pair))
            (folder / "topology/physical_package_id").write_text(f"{socket}\n")
    return root


@pytest.mark.parametrize(
    ("numbered", "expected"),
    [
        ("apart", [{0, 1, 8, 9}, {2, 3, 10, 11}, {4, 5, 12, 13}, {6, 7, 14, 15}]),
        ("together", [{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}, {12, 13, 14, 15}]),
        ("in turn", [{0, 2, 8, 10}, {4, 6, 12, 14}, {1, 3, 9, 11}, {5, 7, 13, 15}]),
    ],
)
def test_ranks_get_whole_cores_of_one_socket(
    tmp_path: Path, numbered: str, expected: list[set[int]]
) -> None:
    root = machine(tmp_path, 2, 4, numbered=numbered)
    assert shares(range(16), 4, root) == expected


def test_only_the_cpus_of_the_job_are_divided(tmp_path: Path) -> None:
    root = machine(tmp_path, 2, 4, numbered="apart")
    assert shares({2, 3, 10, 11}, 2, root) == [{2, 10}, {3, 11}]
    assert shares({2, 3, 10, 11}, 4, root) == [{2}, {10}, {3}, {11}]  # fewer cores than ranks
    assert shares({0, 1, 2}, 2, root) == [{0}, {1}]  # as many for each
    assert shares({0, 1}, 3, root) == []


def test_a_kernel_that_tells_nothing_has_a_core_per_cpu(tmp_path: Path) -> None:
    assert shares({0, 1, 2, 3}, 2, tmp_path) == [{0, 1}, {2, 3}]


def test_the_cpus_of_this_machine_are_divided() -> None:
    here = os.sched_getaffinity(0)
    assert shares(here, 1) == [here]
    assert set().union(*shares(here, len(here))) == here
