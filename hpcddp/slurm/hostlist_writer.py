"""Writes Slurm host lists: five names as ``n[1-3,05],login1``.

Slurm reads them in the same order (tested with 22.05): at most two pairs of brackets in a name, and
nothing after the last. Order and repetition are kept.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import groupby

from hpcddp.errors import TopologyError
from hpcddp.slurm.hostlist import CHARACTERS, DIGITS


def compress_hosts(hosts: Iterable[str]) -> str:
    """A short host list of these names, in this order; it expands to ``hosts``.

    Neighbours that differ in one number share a pair of brackets. For the shortest list, sort the
    names first.
    """
    cut = re.compile(rf"(?<!\d)(\d{{1,{DIGITS}}})(?!\d)").split
    rows = [cut(_checked(name)) for name in hosts]  # text, number, text, number, ..., text
    # From the right: a later fold varies slower, as in the expansion.
    for field in range(max(map(len, rows), default=0) - 2, 0, -2):
        rows = list(_fold(rows, field))
    return ",".join(map("".join, rows))


def _fold(rows: list[list[str]], field: int) -> Iterator[list[str]]:
    """Join neighbours that differ only in the number at ``field``."""
    for (left, right), same in groupby(rows, lambda row: (row[:field], row[field + 1 :])):
        group = list(same)
        if len(group) > 1 and (right == [""] or _one_pair_at_the_end("".join(right))):
            yield [*left, f"[{number_ranges([row[field] for row in group])}]", *right]
        else:
            yield from group


def _one_pair_at_the_end(text: str) -> bool:
    """Only then may another pair come before it: Slurm orders three pairs differently."""
    return text.endswith("]") and text.count("[") == 1


def number_ranges(numbers: list[str]) -> str:
    """``1 2 3 05 06`` as ``1-3,05-06``."""
    spans: list[list[str]] = []
    expected = ""
    for number in numbers:
        if number == expected:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
        expected = str(int(number) + 1).zfill(len(spans[-1][0]))
    return ",".join(map("-".join, spans))


def _checked(name: str) -> str:
    if not name or name.startswith("-") or name.strip(CHARACTERS):
        raise TopologyError(
            f"invalid host name {name!r:.60}",
            where="host list",
            hint="use letters, digits, '.', '_' and '-', and do not start with '-'",
        )
    return name
