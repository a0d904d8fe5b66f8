"""Sizes, as a person writes and reads them."""

import pytest

from hpcddp.errors import UserError
from hpcddp.sizes import bytes_of, size

G = 2**30


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [("", 0), ("80G", 80 * G), ("80 GiB", 80 * G), ("1.5g", 1.5 * G), ("512MB", G / 2), ("64", 64)],
)
def test_sizes_are_read(text: str, bytes_: float) -> None:
    assert bytes_of(text, "--memory") == bytes_


@pytest.mark.parametrize("text", ["much", "0G", "-1G", "80X", "G", "1e3", "80GG"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"--memory: .*no size of memory"):
        bytes_of(text, "--memory")


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0B"), (999, "999B"), (1000, "0.977K"), (1023.9 * 1024, "1M"), (80 * G, "80G"),
     (1.0625 * G, "1.06G"), (123.4 * 2**20, "123M"), (5000 * 2**40, "5000T")],
)  # fmt: skip
def test_sizes_have_three_digits(count: float, text: str) -> None:
    assert size(count) == text


def test_zero_is_a_size_where_nothing_is_kept() -> None:
    assert bytes_of("0", "data.cache", what="a cache", zero=True) == 0
    with pytest.raises(UserError, match="no size of a cache"):
        bytes_of("none", "data.cache", what="a cache", zero=True)
