from collections.abc import Callable
from typing import Any

import pytest

from hpcddp.doctor import diagnosis

GB = 10**9
Results = dict[str, Any]


def node(rank: int) -> dict[str, Any]:
    """The row of the first rank of a healthy node."""
    disk = {"free": 500 * GB, "size": 1000 * GB, "free_files": 10**6, "files": 10**7}
    return {
        "rank": rank, "node": rank // 2, "host": f"n{rank // 2}", "architecture": "x86_64",
        "libc": "glibc 2.36",
        "python": "3.11.7", "torch": "2.13.0", "device": "cuda:0", "import_seconds": 3.0,
        "visible": 0.0, "clock": 0.001, "home": True, "open_files": 10**6, "folder": disk,
        "tmp": disk, "writes": {"median": 0.01, "longest": 0.1}, "address": f"10.0.0.{rank}",
        "unreachable": {}, "interfaces": {"ib0": 200000},
        "gpus": [{"ecc_errors": "0", "temperature": "40", "throttle": "0x0", "driver": "550.54"}],
    }  # fmt: skip


def results() -> Results:
    """Three healthy nodes of two ranks."""
    rows = []
    for rank in range(6):
        row = node(rank)
        short = ("rank", "node", "torch", "device", "import_seconds", "visible", "clock")
        rows.append(row if rank % 2 == 0 else {name: row[name] for name in short})
        rows[-1]["device"] = f"cuda:{rank % 2}"
    pairs = [[0, 1, 20 * GB], [0, 2, 21 * GB], [1, 2, 20 * GB]]
    return {"ranks": rows, "backend": "nccl", "slow": {}, "rates": [1e14] * 6, "pairs": pairs,
            "all_reduce": [{"bytes": 1024, "seconds": 5e-5, "bus": 4e7}]}  # fmt: skip


def test_healthy_nodes_have_no_findings() -> None:
    here = {"python": "3.11.7", "torch": "2.13.0+cu130", "clock": -0.2}
    assert diagnosis.of(results() | {"here": here}) == []
    assert diagnosis.of(results()) == []


def first(change: dict[str, Any]) -> Callable[[Results], None]:
    """A change of the first rank of the second node."""
    return lambda data: data["ranks"][2].update(change)


@pytest.mark.parametrize(
    ("change", "level", "where", "what"),
    [
        (first({"python": "3.12.1"}), "error", "all nodes",
         "Python differs: 3.11.7 on n0, n2, 3.12.1 on n1"),
        (first({"libc": "glibc 2.28"}), "warning", "all nodes",
         "libc differs: glibc 2.36 on n0, n2, glibc 2.28 on n1"),
        (first({"gpus": [{"driver": "535.1"}]}), "warning", "all nodes",
         "the GPU driver differs: 550.54 on n0, n2, 535.1 on n1"),
        (first({"folder": {}}), "error", "n1", "the runs folder cannot be read"),
        (first({"tmp": {"free": GB, "size": 100 * GB, "free_files": 9, "files": 0}}),
         "warning", "n1", "are free in /tmp"),
        (first({"open_files": 1024}), "warning", "n1", "a process may open 1024 files"),
        (first({"writes": {"median": 1.5, "longest": 2.0}}), "warning", "n1",
         "takes 1.5 s to write"),
        (first({"home": False}), "warning", "n1", "the home folder does not exist"),
        (first({"address": "127.0.1.1"}), "error", "n1", "its address is 127.0.1.1"),
        (first({"unreachable": {"api:443": "timed out"}}), "error", "n1",
         "api:443 cannot be reached: timed out"),
        (first({"gpus": [{"ecc_errors": "3", "temperature": "4", "throttle": "0x0"}]}), "error",
         "n1", "GPU 0 has 3 uncorrected memory errors"),
        (first({"gpus": [{"ecc_errors": "0", "temperature": "95", "throttle": "0x40"}]}), "warning",
         "n1", "GPU 0 is slowed down: too hot (hardware) (95 degrees)"),
        (lambda data: data.update(here={"torch": "2.12.0+cpu"}), "warning", "here",
         "torch differs: 2.12.0 here, 2.13.0 on the nodes"),
        (lambda data: data.update(here={"clock": 30.0}), "warning", "here",
         "the clock differs by +30.0 s"),
        (first({"import_seconds": 90.0}), "warning", "n1", "importing torch takes 90 s"),
        (first({"visible": None}), "error", "n1", "is not visible"),
        (first({"clock": -4.2}), "warning", "n1", "the clock differs by -4.2 s"),
        (lambda data: data.update(slow={"2": 0.5, "3": 0.48}), "warning", "n1",
         "computes at 49% of the speed of the others"),
        (lambda data: data.update(slow={"3": 0.4}), "warning", "n1", "cuda:1 computes at 40%"),
        (lambda data: data["pairs"][1].__setitem__(2, 2 * GB), "warning", "n0 and n2",
         "between these nodes"),
    ],
)  # fmt: skip
def test_a_fault_is_named_with_its_node(
    change: Callable[[Results], None], level: str, where: str, what: str
) -> None:
    data = results()
    change(data)
    (row,) = diagnosis.of(data)
    assert (row.level, row.where) == (level, where) and what in row.what and row.hint


@pytest.mark.parametrize("unknown", [{"gpus": []}, {"gpus": [{}]}, {"libc": " "}])
def test_a_node_whose_driver_or_libc_is_unknown_differs_from_none(unknown: Results) -> None:
    data = results()
    first(unknown)(data)
    assert diagnosis.of(data) == []


def test_a_node_without_the_runs_folder_is_named() -> None:
    data = results()
    first({"folder": {}, "writes": {}, "visible": None})(data)
    assert [(row.level, row.where) for row in diagnosis.of(data)] == [("error", "n1")] * 2


def test_the_same_fault_of_several_nodes_is_one_line_and_errors_come_first() -> None:
    data = results()
    for row in data["ranks"]:
        row["import_seconds"] = 60.0
    data["ranks"][4]["gpus"] = [{"ecc_errors": "1", "temperature": "40", "throttle": "0x0"}]
    faulty, slow = diagnosis.of(data)
    assert faulty.level == "error" and slow.where == "n0, n1, n2"


def test_a_torch_without_cuda_on_a_node_with_gpus_is_an_error() -> None:
    data = results() | {"backend": "gloo"}
    assert {row.what for row in diagnosis.of(data)} == {"torch does not use the GPUs of the node"}
    assert diagnosis.of(data | {"device": "cpu"}) == []  # as asked: --procs
