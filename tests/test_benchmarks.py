"""Benchmarks: measurements in turn, statistics, limits, and a run of the program."""

import json
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import against
from benchmarks.measure import Row, interleave, spread
from benchmarks.report import data, table
from benchmarks.site import Site, output, wall
from hpcddp.errors import HpcddpError

ROOT = Path(__file__).parent.parent


def recorder(log: list[str]) -> Callable[[str], Callable[[], float]]:
    """Make measurements that log their name and return the length of the log."""

    def make(name: str) -> Callable[[], float]:
        def take() -> float:
            log.append(name)
            return float(len(log))

        return take

    return make


def test_subjects_take_turns_and_every_other_round_goes_backwards() -> None:
    log: list[str] = []
    take = recorder(log)
    interleave([take("a"), take("b")], 3, lambda number: None)
    assert "".join(log) == "ab" + "ab" + "ba" + "ab"


def test_the_first_take_of_each_does_not_count() -> None:
    log: list[str] = []
    take = recorder(log)
    rounds: list[int] = []
    assert interleave([take("a"), take("b")], 2, rounds.append) == [[3.0, 6.0], [4.0, 5.0]]
    assert rounds == [1, 2]


def test_the_ratio_is_of_the_medians_and_pairs_are_looked_at_apart() -> None:
    row = Row("x", [1.0, 4.0, 30.0], [2.0, 1.0, 10.0])
    assert row.ratio == 2.0  # 4 / 2
    assert row.pair_ratio == 3.0  # of 0.5, 4 and 3


def test_a_slow_take_moves_neither_median_nor_quartiles_much() -> None:
    found = spread([1.0, 2.0, 3.0, 4.0, 1000.0])
    assert (found.low, found.median, found.high) == (2.0, 3.0, 4.0)
    assert spread([7.0]) == spread([7.0, 7.0])


@pytest.mark.parametrize(
    ("ours", "ratio_limit", "limit", "met"),
    [
        (1.3, 1.3, None, True),
        (1.31, 1.3, None, False),
        (0.099, None, 0.1, True),
        (0.1, None, 0.1, False),
        (1.2, 1.3, 1.0, False),
        (99.0, None, None, None),
    ],
)
def test_verdict(
    ours: float, ratio_limit: float | None, limit: float | None, met: bool | None
) -> None:
    assert Row("x", [ours], [1.0], ratio_limit=ratio_limit, limit=limit).met is met


def test_a_limit_may_leave_so_much_beyond_the_floor() -> None:
    assert Row("x", [3.5], [1.0], ratio_limit=1.5, allowance=2.0).met is True
    assert Row("x", [3.6], [1.0], ratio_limit=1.5, allowance=2.0).met is False
    assert Row("x", [7.2], [2.0], ratio_limit=1.5, allowance=2.0).met is False


def test_where_more_is_better_the_limit_is_the_least() -> None:
    assert Row("x", [0.75], [0.5], unit="", ratio_least=1.5).met is True
    assert Row("x", [0.74], [0.5], unit="", ratio_least=1.5).met is False


def test_beside_another_commit_a_ratio_counts_where_the_middle_halves_lie_apart() -> None:
    slow, floor = [1.2, 1.3, 1.4], [1.0, 1.1, 1.2]
    assert Row("x", slow, floor, ratio_limit=1.02, apart=True).met is False
    assert Row("x", [1.0, 1.3, 1.4], floor, ratio_limit=1.02, apart=True).met is True
    assert Row("x", floor, slow, ratio_limit=1.02, apart=True).met is True
    assert Row("x", [1.0], [2.0], unit="", ratio_least=0.98, apart=True).met is False
    assert Row("x", [2.0], [1.0], unit="", ratio_least=0.98, apart=True).met is True


# Logs its side, and writes the given figures.
SIDE = """#!/bin/sh
echo {name} >>{turns}
while [ "$1" != --json ]; do shift; done
echo '{{"rows": [{rows}]}}' >"$2"
"""


def test_two_commits_take_turns(tmp_path: Path) -> None:
    row = '{{"name": "{}", "unit": "s", "ratio_least": null, "ours": [{}], "floor": [9]}}'
    sides, turns = [], tmp_path / "turns"
    for name, figure, more in (("ours", 2.0, "new"), ("theirs", 1.0, "old")):
        program = tmp_path / name / ".venv/bin/python"
        program.parent.mkdir(parents=True)
        rows = ", ".join((row.format("help", figure), row.format(more, 5)))
        program.write_text(SIDE.format(name=name, turns=turns, rows=rows))
        program.chmod(0o755)
        sides.append(tmp_path / name)
    (found,) = against.in_turn(sides[0], sides[1], ["help"], 3)
    assert (found.name, found.ours, found.floor, found.met) == ("help", [2.0] * 3, [1.0] * 3, False)
    assert turns.read_text().split() == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]


def test_a_side_without_figures_is_told(tmp_path: Path) -> None:
    program = tmp_path / ".venv/bin/python"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho no such benchmark >&2; exit 2\n")
    program.chmod(0o755)
    with pytest.raises(HpcddpError) as caught:
        against.take(tmp_path, ["help"])
    assert caught.value.where == str(tmp_path) and "no such benchmark" in caught.value.hint


def test_the_table_fits_a_terminal_and_says_what_is_not_met() -> None:
    rows = [
        Row("help", [0.065, 0.066], [0.06, 0.06], ratio_limit=1.3),
        Row("start, submit", [12.3, 14.5], [10.1, 10.2], ratio_limit=1.1),
        Row("ranks memory", [2.3e6], [2.2e6], unit="B"),
        Row("ranks", [0.123], [0.02], limit=0.1),
        Row("leave", [1.76], [0.91], ratio_limit=1.5, allowance=2.0),
        Row("goodput, submitit", [0.7], [0.4], unit="", ratio_least=1.5),
        Row("agree, 2 ranks", [2e-5], [5e-3], ratio_limit=0.01),
    ]
    head, first, second, third, fourth, leave, goodput, agree = table(rows).splitlines()
    assert max(map(len, table(rows).splitlines())) <= 80
    assert "ratio" in head
    assert first.startswith("help, ms") and first.endswith("1.30 met")
    assert second.startswith("start, submit, s") and second.endswith("1.10 NOT MET")
    assert third.split()[-2:] == ["1.05", "1.05"]
    assert fourth.endswith("100 ms NOT MET")
    assert leave.endswith("1.50+2 s met")
    assert " 0.70 (0.70-0.70) " in goodput and goodput.endswith(">=1.50 met")
    assert agree.endswith("0.004 0.004 0.01 met")


def test_the_data_holds_every_figure_and_the_verdict() -> None:
    found = json.loads(json.dumps(data([Row("x", [3.0], [2.0], ratio_limit=1.1)], {"cpus": 2})))
    (row,) = found["rows"]
    assert (row["ours"], row["floor"], row["ratio"], row["met"]) == ([3.0], [2.0], 1.5, False)
    assert found["machine"] == {"cpus": 2}


def test_a_whole_process_is_timed_to_its_end_and_its_failure_is_told(tmp_path: Path) -> None:
    with Site(1) as site:
        sleeping = [sys.executable, "-c", "import time; time.sleep(0.2)"]
        assert wall(sleeping, site.environ, tmp_path) >= 0.2
        with pytest.raises(HpcddpError, match="exit code 3") as error:
            output([sys.executable, "-c", "print('no'); exit(3)"], site.environ, tmp_path)
        assert error.value.what.endswith("exit code 3")


def test_both_sides_run_compiled_and_without_foreign_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("PYTHONDONTWRITEBYTECODE", "SLURM_JOB_ID", "HPCDDP_RUNS", "SLURM_CONF"):
        monkeypatch.setenv(name, "1")
    environ = Site(1).environ
    assert not {n for n in environ if n.startswith(("PYTHON", "SLURM", "HPCDDP"))}
    assert "PATH" in environ


def test_folders_are_new_and_gone_afterwards() -> None:
    with Site(1) as site:
        first, second = site.fresh(), site.fresh()
        assert first != second and not list(first.iterdir())
    assert not first.exists() and not site.folder.exists()


def test_the_program_measures_prints_and_leaves_with_the_verdict(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks", "ranks", "--pairs", "2", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "ranks memory" in done.stdout
    found = json.loads(file.read_text())
    assert [len(row["ours"]) for row in found["rows"]] == [2, 2]
    assert done.returncode == int(any(row["met"] is False for row in found["rows"]))


@pytest.fixture
def spread_loop() -> Any:
    """The ranks' part of `spread`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit", category=DeprecationWarning)
        from benchmarks import spread_loop
    return spread_loop


def test_what_this_process_sends_is_counted(spread_loop: Any) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as mine,
        server.accept()[0] as other,
    ):
        before = spread_loop.sent()
        mine.sendall(b"x" * 100_000)
        assert len(other.recv(100_000, socket.MSG_WAITALL)) == 100_000
        other.sendall(b"y" * 500)
        assert len(mine.recv(500, socket.MSG_WAITALL)) == 500
        assert (
            spread_loop.sent() - before == 100_500
        )  # both ends of the connection are in this process


def test_a_storage_counts_once_and_one_given_back_not_at_all(spread_loop: Any) -> None:
    whole, gone = torch.zeros(8, 16), torch.zeros(1000)
    gone.untyped_storage().resize_(0)
    assert spread_loop._bytes([whole, whole[:2], gone, torch.zeros(3)]) == 4 * 8 * 16 + 12


def test_an_unknown_name_is_refused() -> None:
    command = [sys.executable, "-m", "benchmarks", "nothing"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "unknown benchmark 'nothing'" in done.stderr


@pytest.mark.parametrize(("slowest", "met"), [(3.9, True), (4.1, False)])
def test_no_measurement_may_take_twice_the_limit(slowest: float, met: bool) -> None:
    row = Row("x", [1.0, 1.0, slowest], [1.0, 1.0, 1.0], limit=2.0, twice=True)
    assert row.met is met and "each 4" in table([row])
