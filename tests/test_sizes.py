"""Sizes, as a person writes and reads them."""

import pytest

from hpcddp.errors import TopologyError, UserError
from hpcddp.sizes import NodeRange, amount, bytes_of, counted, parse_gpus, parse_nodes, size

G = 2**30


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [
        ("", 0),
        ("80G", 80 * G),
        ("80 GiB", 80 * G),
        ("1.5g", 1.5 * G),
        ("512MB", G / 2),
        ("64B", 64),
    ],
)
def test_sizes_are_read(text: str, bytes_: float) -> None:
    assert bytes_of(text, "--memory") == bytes_


@pytest.mark.parametrize("text", ["much", "0G", "-1G", "80X", "G", "1e3", "80GG"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"--memory: invalid memory size"):
        bytes_of(text, "--memory")


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0B"), (999, "999B"), (1000, "0.977K"), (1023.9 * 1024, "1M"), (80 * G, "80G"),
     (1.0625 * G, "1.06G"), (123.4 * 2**20, "123M"), (5000 * 2**40, "5000T")],
)  # fmt: skip
def test_sizes_have_three_digits(count: float, text: str) -> None:
    assert size(count) == text


def test_zero_is_a_size_where_nothing_is_kept() -> None:
    assert bytes_of("0", "data.cache", what="cache", zero=True) == 0
    with pytest.raises(UserError, match="invalid cache size 'none'"):
        bytes_of("none", "data.cache", what="cache", zero=True)


@pytest.mark.parametrize("text", ["80", "1.5", "80 "])
def test_a_number_without_a_unit_is_refused_with_the_units(text: str) -> None:
    with pytest.raises(UserError, match="has no unit") as caught:
        bytes_of(text, "--memory")
    number = text.strip()
    assert f"write {number}G for gigabytes, or {number}B for bytes" in caught.value.hint
    assert bytes_of("80", "size", bare=True) == 80


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "0.977 KB"), (80 * G, "80 GB"), (1.0625 * G, "1.06 GB")],
)
def test_amounts_have_a_space_and_a_unit(count: float, text: str) -> None:
    assert amount(count) == text


def test_a_number_of_one_has_a_noun_of_one() -> None:
    assert counted(1, "node") == "1 node"
    assert (counted(0, "node"), counted(2, "GPU")) == ("0 nodes", "2 GPUs")
    assert counted(2, "process", "processes") == "2 processes"


@pytest.mark.parametrize(
    ("value", "nodes"),
    [
        (2, NodeRange(2, 2)),
        ("2", NodeRange(2, 2)),
        ("1-4", NodeRange(1, 4)),
        ("3-3", NodeRange(3, 3)),
    ],
)
def test_numbers_of_nodes(value: object, nodes: NodeRange) -> None:
    assert parse_nodes(value) == nodes
    assert parse_nodes(str(nodes)) == nodes


BAD = [0, -1, "0", "-1", "two", "", "1.0", 2.0, True, None, [2], "+1", "1_0", " 1", "٣", "9" * 5000]


@pytest.mark.parametrize("value", [*BAD, "4-1", "1-", "0-2", "1-2-3", "1--2", "a-b"])
def test_what_is_no_number_of_nodes_is_refused_with_what_is_accepted(value: object) -> None:
    with pytest.raises(TopologyError) as caught:
        parse_nodes(value, where="--nodes")
    assert caught.value.where == "--nodes"
    assert repr(value)[:50] in caught.value.what
    assert "from 1 on (2), or a range (1-4)" in caught.value.hint


def test_numbers_of_gpus() -> None:
    assert parse_gpus("4") == parse_gpus(4) == 4


@pytest.mark.parametrize("value", [*BAD, "1-2"])
def test_what_is_no_number_of_gpus_is_refused(value: object) -> None:
    with pytest.raises(TopologyError, match="GPUs per node") as caught:
        parse_gpus(value, where="--gpus")
    assert caught.value.where == "--gpus"
