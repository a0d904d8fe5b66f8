import json
import time

import pytest
from click.testing import CliRunner, Result

from hpcddp.cli.ranks import ranks
from hpcddp.errors import UserError


def show(*arguments: str) -> Result:
    return CliRunner().invoke(ranks, arguments, catch_exceptions=False)


def test_the_table_is_aligned() -> None:
    result = show("-N", "2", "--gpus", "2", "--hosts", "login1,n[7]")
    assert result.output.splitlines() == [
        "rank  node  host    local rank",
        "   0     0  login1           0",
        "   1     0  login1           1",
        "   2     1  n7               0",
        "   3     1  n7               1",
    ]


def test_the_least_map() -> None:
    assert show().output.splitlines()[1:] == ["   0     0  -              0"]


def test_json_is_one_object() -> None:
    assert json.loads(show("--nodes", "2", "--gpus", "1", "--hosts", "a,b", "--json").stdout) == {
        "schema_version": 1,
        "nodes": 2,
        "gpus_per_node": 1,
        "world_size": 2,
        "ranks": [
            {"rank": 0, "node": 0, "host": "a", "local_rank": 0},
            {"rank": 1, "node": 1, "host": "b", "local_rank": 0},
        ],
    }


def test_json_without_hosts_says_null() -> None:
    assert json.loads(show("--json").stdout)["ranks"][0]["host"] is None


def test_of_a_range_the_largest_map_is_shown_and_that_is_said() -> None:
    result = show("-N", "1-3", "--json")
    assert json.loads(result.stdout)["world_size"] == 3
    assert result.stderr == "note: this is the map of 3 nodes (of 1-3)\n"


def test_places_in_the_mesh_are_columns_of_what_is_wider_than_one() -> None:
    assert show("--gpus", "4", "--strategy", "pp=2,ddp").output.splitlines() == [
        "rank  node  host  local rank    pp   ddp  data",
        "   0     0  -              0     0     0     0",
        "   1     0  -              1     0     1     1",
        "   2     0  -              2     1     0     0",
        "   3     0  -              3     1     1     1",
    ]


def test_places_in_the_mesh_are_in_json_too() -> None:
    data = json.loads(show("-N", "2", "--gpus", "2", "--strategy", "fsdp,tp=2", "--json").stdout)
    assert data["strategy"] == "fsdp=2,tp=2"
    assert [(row["fsdp"], row["tp"], row["data"]) for row in data["ranks"]] == [
        (0, 0, 0), (0, 1, 0), (1, 0, 1), (1, 1, 1),
    ]  # fmt: skip
    assert "pp" not in data["ranks"][0]


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_a_replica_a_rank_needs_no_more_columns(strategy: str) -> None:
    asked = ("-N", "2", "--gpus", "2")
    assert show(*asked, "--strategy", strategy).output == show(*asked).output


def test_one_process_that_drives_all_gpus_is_one_rank() -> None:
    data = json.loads(show("--gpus", "4", "--strategy", "dp", "--json").stdout)
    assert (data["gpus_per_node"], data["world_size"], len(data["ranks"])) == (4, 1, 1)


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        (["--nodes", "two"], "--nodes"),
        (["--gpus", "0"], "--gpus"),
        (["--nodes", "2", "--hosts", "a"], "host list"),
        (["--hosts", "n[1"], "host list"),
        (["--strategy", "dd"], "--strategy"),
        (["--gpus", "4", "--strategy", "tp=3,ddp"], "--strategy"),
        (["--nodes", "2", "--strategy", "dp"], "--strategy"),
    ],
)
def test_bad_input_prints_no_map(
    arguments: list[str], where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError) as caught:
        ranks.main(arguments, standalone_mode=False)
    assert caught.value.where == where
    assert capsys.readouterr().out == ""


def test_the_largest_machines_are_a_matter_of_a_second() -> None:
    start = time.perf_counter()
    result = show("-N", "10000", "--gpus", "8", "--hosts", "n[00000-09999]")
    assert time.perf_counter() - start < 5  # about 0.2 s
    assert result.output.splitlines()[-1] == "79999  9999  n09999           7"
