import tomllib
from typing import Any

import pytest

from hpcddp.errors import ClusterError
from hpcddp.planning.site import profile_writer
from hpcddp.planning.site.choices import Choice
from hpcddp.planning.site.profile_writer import Change, Written

FIRST = [
    Choice("description", "hpc: Slurm 24", ""),
    Choice("slurm.partition", "gpu", "guess: the default has no GPUs"),
    Choice("gpu_option", "gres", "select/linear"),
]


def again(text: str, written: Written, *choices: Choice, force: bool = False) -> Written:
    """The profile after a later detection."""
    return profile_writer.write(
        "hpc", choices, present=text, earlier=written.values, force=force, where="hpc.toml"
    )


@pytest.fixture
def first() -> Written:
    return profile_writer.write("hpc", FIRST)


def read(text: str) -> dict[str, Any]:
    return tomllib.loads(text)


def test_a_new_profile_says_where_it_comes_from_and_why(first: Written) -> None:
    assert read(first.text) == {
        "description": "hpc: Slurm 24",
        "gpu_option": "gres",
        "slurm": {"partition": "gpu"},
    }
    assert 'partition = "gpu"  # guess: the default has no GPUs\n' in first.text
    schema, title, *_ = first.text.splitlines()
    assert schema == "#:schema ./cluster.schema.json" and "Slurm cluster hpc" in title
    assert not first.kept


def test_an_unchanged_value_follows_the_cluster(first: Written) -> None:
    second = again(first.text, first, *FIRST[:2], Choice("gpu_option", "gpus-per-node", "new"))
    assert read(second.text)["gpu_option"] == "gpus-per-node" and not second.kept
    assert second.text.count("gpu_option") == 1


def test_what_a_person_changed_stays_with_the_rest_of_the_file(first: Written) -> None:
    text = first.text.replace('"gpu"', '"mine"').replace("# guess", "# chosen by me; guess")
    text += 'qos = "long"  # for the deadline\n'
    for _ in range(2):  # also after a detection that kept it
        second = again(text, first, *FIRST, Choice("slurm.qos", "normal", ""))
        assert second.text == text
        assert second.kept == (
            Change("slurm.partition", "mine", "gpu"),
            Change("slurm.qos", "long", "normal"),
        )
        first = second


def test_what_a_person_removed_stays_away(first: Written) -> None:
    text = first.text.replace('gpu_option = "gres"  # select/linear\n', "")
    second = again(text, first, *FIRST)
    assert "gpu_option" not in second.text
    assert second.kept == (Change("gpu_option", None, "gres"),)


def test_what_is_detected_no_more_goes(first: Written) -> None:
    second = again(first.text, first, *FIRST[:1], FIRST[2])
    assert read(second.text) == {
        "description": "hpc: Slurm 24",
        "gpu_option": "gres",
        "slurm": {},
    }


def test_a_new_table_comes_behind_the_rest(first: Written) -> None:
    bare = profile_writer.write("hpc", FIRST[:1])
    second = again(bare.text, bare, *FIRST)
    assert read(second.text) == read(first.text)


def test_a_profile_of_a_person_stays_as_it_is(first: Written) -> None:
    text = '# mine\ngpu_option = "none"\n'
    second = profile_writer.write("hpc", FIRST, present=text, notes=["# unknown: QOS"])
    assert second.text == text
    assert second.kept == (
        Change("description", None, "hpc: Slurm 24"),
        Change("slurm.partition", None, "gpu"),
        Change("gpu_option", "none", "gres"),
    )
    assert again(text, second, *FIRST) == second  # a later detection
    forced = again(text, second, *FIRST, force=True)
    assert read(forced.text) == read(first.text) and forced.text.startswith("# mine\n")


def test_force_replaces_what_a_person_changed(first: Written) -> None:
    text = first.text.replace('"gpu"', '"mine"')
    second = again(text, first, *FIRST, force=True)
    assert read(second.text) == read(first.text) and not second.kept


def test_a_file_that_is_no_toml_is_an_error() -> None:
    with pytest.raises(ClusterError, match="not TOML"):
        profile_writer.write("hpc", FIRST, present="a = = b", where="hpc.toml")
