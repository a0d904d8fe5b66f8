"""A function on the workers of Dask clusters as ranks, with real processes."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import dask_ranks
import pytest
from distributed import Client, LocalCluster, wait

import hpcddp.dask
from hpcddp import processes
from hpcddp.dask import DaskResultsHandler, dispatch, placement
from hpcddp.dask.placement import WorkerInfo
from hpcddp.errors import RankError, UserError

NO_PORT = "127.0.0.1:0"  # any free port for the web server


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=NO_PORT) as made:
        yield made


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster) as made:
        made.wait_for_workers(2)  # a test may have ended one
        yield made


def up(folder: Path, count: int = 2) -> list[int]:
    """Wait for the process ids of ``count`` ranks."""
    deadline = time.monotonic() + 60
    while len(pids := [int(p.name.partition("-")[2]) for p in folder.iterdir()]) < count:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return pids


def gone(pids: list[int]) -> bool:
    """Whether these processes end within a time limit."""
    deadline = time.monotonic() + 60
    while any(processes.start_of(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(processes.start_of(pid) for pid in pids)


def test_the_ranks_meet_and_answer_in_their_order(client: Client) -> None:
    client.run(lambda: __import__("os").environ.update(CUDA_VISIBLE_DEVICES="4,5"))
    answers = hpcddp.dask.run(client, dask_ranks.tell, 1, backend="gloo", b="c")
    common = {"WORLD_SIZE": "2", "GROUP_RANK": "0", "backend": "gloo", "sum": 1.0}
    assert answers == [
        {"RANK": str(i), "LOCAL_RANK": str(i), "got": [(1,), {"b": "c"}], **common,
         "CUDA_VISIBLE_DEVICES": devices}
        for i, devices in enumerate(("4,5", "5,4"))
    ]  # fmt: skip
    left = client.run(lambda: __import__("os").environ.get("RANK"))
    assert list(left.values()) == [None, None]  # the workers have not changed


def test_workers_that_are_threads_have_ranks_that_are_processes() -> None:
    with Client(n_workers=2, processes=False, dashboard_address=NO_PORT) as client:
        answers = hpcddp.dask.run(client, dask_ranks.tell, backend="gloo")
    assert [rank["sum"] for rank in answers] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("kill", "was ended by SIGKILL"),
        ("worker", "ended together with its Dask worker"),
    ],
)
def test_a_rank_that_fails_ends_all_and_is_named(
    client: Client, tmp_path: Path, how: str, error: str
) -> None:
    with pytest.raises(RankError, match=f"(?s)^rank 1 on .*{error}"):
        hpcddp.dask.run(client, dask_ranks.fail, str(tmp_path), how)
    assert gone(up(tmp_path))


def test_ranks_end_when_they_are_cancelled_or_their_client_is_gone(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    for end in ("cancel", "close"):
        (tmp_path / end).mkdir()
        with Client(cluster) as client:
            client.wait_for_workers(2)
            ranks = hpcddp.dask.start(client, dask_ranks.wait, str(tmp_path / end))
            pids = up(tmp_path / end)
            if end == "cancel":
                ranks.cancel()
                assert gone(pids)
        assert gone(pids)


@pytest.mark.parametrize("part", ["function", "argument 1", "argument key"])
def test_what_cannot_be_pickled_is_told_before_anything_runs(client: Client, part: str) -> None:
    held = threading.Lock()

    def fn(*args: object, **kwargs: object) -> bool:
        return held.locked()

    with pytest.raises(UserError, match=r"cannot pickle .*: .*lock") as caught:
        if part == "function":
            hpcddp.dask.run(client, fn)
        elif part == "argument 1":
            hpcddp.dask.run(client, dask_ranks.tell, held)
        else:
            hpcddp.dask.run(client, dask_ranks.tell, key=held)
    assert part in caught.value.what
    assert "inside the function" in caught.value.hint


def test_a_result_that_cannot_be_pickled_is_told(client: Client) -> None:
    with pytest.raises(RankError, match=r"cannot pickle '_thread.lock' object"):
        hpcddp.dask.run(client, dask_ranks.lock)


def test_a_cluster_without_workers_is_told() -> None:
    with (
        LocalCluster(n_workers=0, dashboard_address=NO_PORT) as empty,
        Client(empty) as client,
        pytest.raises(UserError, match="no workers"),
    ):
        hpcddp.dask.run(client, dask_ranks.tell)


def test_results_arrive_once_each(client: Client, tmp_path: Path) -> None:
    handler = DaskResultsHandler()
    ranks = hpcddp.dask.start(client, dask_ranks.submit, handler, 200)
    handler.process_results(tmp_path / "new", ranks)
    contents = {p.relative_to(tmp_path / "new").as_posix(): p.read_bytes() for p in files(tmp_path)}
    expected = {
        f"rank-{r}/{i}.txt": f"größe {r} {i}".encode() for r in range(2) for i in range(200)
    }
    expected |= {f"last-{r}": b"\0" + str(r).encode() for r in range(2)}
    own = Path(dask_ranks.__file__).read_bytes()
    assert contents == expected | {f"own-{r}.py": own for r in range(2)}
    assert all("cannot be called in a data worker" in error for error in ranks.results())


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_rank_that_raises_is_told_with_its_traceback_and_leaves_what_it_sent(
    client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "up").mkdir()
    handler = DaskResultsHandler("mine")
    ranks = hpcddp.dask.start(client, dask_ranks.fail, str(tmp_path / "up"), "raise", handler)
    message = r"(?s)^rank 1 on .* in fail\n.*\nValueError: no such luck$"
    with pytest.raises(RankError, match=message):
        handler.process_results(tmp_path / "out", ranks)
    assert [path.read_text() for path in files(tmp_path / "out")] == ["it failed"]
    assert gone(up(tmp_path / "up"))
    handler.process_results(tmp_path / "out", ranks, raise_errors=False)
    assert "ValueError: no such luck" in capsys.readouterr().err


def test_what_was_sent_before_another_rank_failed_is_written(
    client: Client, tmp_path: Path
) -> None:
    handler = DaskResultsHandler()
    ranks = hpcddp.dask.start(client, dask_ranks.send_until_it_ends, str(tmp_path), handler)
    with pytest.raises(RankError, match=r"rank 1 on .*was ended by SIGKILL"):
        handler.process_results(tmp_path / "out", ranks)
    sent = (tmp_path / "sent").read_text().split()
    written = {path.name for path in files(tmp_path / "out")}
    assert len(sent) >= 20 and written >= {*sent}


def test_a_client_that_comes_late_and_cannot_write_one_writes_all_others(
    client: Client, tmp_path: Path
) -> None:
    (tmp_path / "rank-0" / "7.txt").mkdir(parents=True)
    handler = DaskResultsHandler()
    ranks = dispatch.run(client, dask_ranks.submit, handler, 20, backend="gloo")
    wait(list(ranks.futures))
    with pytest.raises(UserError, match=r"rank-0/7.txt: cannot write the result"):
        handler.process_results(tmp_path, ranks)
    assert len(files(tmp_path)) == 20 + 19 + 2 + 2


def test_dispatch_starts_a_function_as_dask_pytorch_ddp_does(client: Client) -> None:
    ranks = dispatch.run(client, dask_ranks.tell, 1, backend="gloo", pass_local_rank=True, b="c")
    arguments = [rank["got"] for rank in ranks.results()]
    assert arguments == [[(1,), {"b": "c", "local_rank": local}] for local in range(2)]


def made(
    host: str, number: int = 0, name: str = "", visible: str = "", job: str = "1"
) -> WorkerInfo:
    return WorkerInfo(host, job, name, number, visible.split(",") if visible else [], 1, 1)


def test_workers_that_a_launcher_numbered_keep_their_ranks() -> None:
    ranks = placement.ranks({"a": made("n2", 2), "b": made("n1", 1), "c": made("n1", 0)})
    rows = [(a, r.world_rank, r.local_rank, r.local_size, r.node) for a, r in ranks.items()]
    assert rows == [("c", 0, 0, 2, 0), ("b", 1, 1, 2, 0), ("a", 2, 0, 1, 1)]


def test_workers_of_batch_scripts_are_ranked_host_by_host() -> None:
    ranks = placement.ranks(
        {"a": made("n1", name="10"), "b": made("n2", name="1"), "c": made("n1", name="9")}
    )
    rows = [(a, r.world_rank, r.local_rank, r.node) for a, r in ranks.items()]
    assert rows == [("c", 0, 0, 0), ("a", 1, 1, 0), ("b", 2, 0, 1)]


@pytest.mark.parametrize(
    ("visible", "own", "gpus"),
    [
        (("0,1,2", "0,1,2", "0,1,2"), ["0,1,2", "1,2,0", "2,0,1"], True),
        (("0,1,2", "1,2,0", "2,0,1"), ["0,1,2", "1,2,0", "2,0,1"], True),  # set by dask-cuda
        (("GPU-a", "GPU-b", "GPU-c"), ["GPU-a", "GPU-b", "GPU-c"], True),  # set by Slurm
        (("0,1", "0,1", "0,1"), ["0,1", "1,0", "0,1"], False),
        (("", "", ""), ["", "", ""], False),
    ],
)
def test_each_rank_begins_with_a_device_of_its_own(
    visible: tuple[str, ...], own: list[str], gpus: bool
) -> None:
    here = [made("n1", visible=names) for names in visible]
    assert [",".join(names) for names in placement.devices(here)] == own
    assert placement.has_gpus(here) is gpus


def test_jobs_of_one_host_see_other_devices_under_the_same_numbers() -> None:
    here = [made("n1", visible="0", job=job) for job in ("1", "2")]
    assert placement.devices(here) == [["0"], ["0"]] and placement.has_gpus(here)


def test_neither_dask_nor_torch_is_imported_before_it_is_needed() -> None:
    code = "import sys, hpcddp.dask; sys.exit(bool({'torch', 'distributed'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_results_of_ranks_that_have_ended_cannot_be_waited_for() -> None:
    with pytest.raises(UserError, match="got a list") as caught:
        hpcddp.dask.DaskResultsHandler().process_results("results", [1])  # type: ignore[arg-type]
    assert "hpcddp.dask.start" in caught.value.hint
