"""Sizes as a person writes them: 80G is 80 x 1024^3 bytes, and 1-4 is a number of nodes."""

from __future__ import annotations

import re
from typing import NamedTuple

from hpcddp.errors import TopologyError, UserError
from hpcddp.topology import whole

UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}  # of 1024
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT]?)(?:i?B)?", re.IGNORECASE)


def bytes_of(text: str, where: str, *, what: str = "memory", zero: bool = False) -> int:
    """A size such as 80G in bytes.

    Args:
        what: the size of what, for the error.
        zero: 0 is a size too, and an empty text is none; else it is 0.

    Raises:
        UserError: it is none.
    """
    match = _SIZE.fullmatch(text.strip())
    if (text or zero) and not (match and (zero or float(match[1]))):
        raise UserError(f"{text!r} is no size of {what}", where=where,
                        hint="write a number and a unit, such as 80G")  # fmt: skip
    return int(float(match[1]) * 1024 ** UNITS[match[2].upper()]) if match else 0


def size(count: float) -> str:
    """Bytes for a person, in powers of 1024: three digits and a unit."""
    power = 0
    while round(count) >= 1000 and power < len(UNITS) - 1:
        count, power = count / 1024, power + 1
    unit = list(UNITS)[power] or "B"
    return f"{count:.0f}{unit}" if power == 0 or count >= 99.95 else f"{count:.3g}{unit}"


class NodeRange(NamedTuple):
    """How many nodes were asked for: exactly ``max``, or anything from ``min`` to ``max``."""

    min: int
    max: int

    def __str__(self) -> str:
        return str(self.max) if self.min == self.max else f"{self.min}-{self.max}"


def parse_nodes(value: object, *, where: str = "nodes") -> NodeRange:
    """Read a number of nodes (``2``, ``"2"``) or a range of them (``"1-4"``)."""
    hint = "give a whole number from 1 on (2), or a range (1-4)"
    first, dash, last = value.partition("-") if isinstance(value, str) else (value, "", value)
    low, high = whole(first), whole(last if dash else first)
    if low is None or high is None:
        raise TopologyError(f"{value!r:.60} is not a number of nodes", where=where, hint=hint)
    if low < 1:
        raise TopologyError(f"{value!r} begins below 1 node", where=where, hint=hint)
    if high < low:
        raise TopologyError(f"the range {value!r} goes down", where=where, hint=hint)
    return NodeRange(low, high)


def parse_gpus(value: object, *, where: str = "gpus") -> int:
    """Read a number of GPUs per node (``4``, ``"4"``)."""
    more = "; without GPUs it counts the processes of a node"
    return parse_count(value, "GPUs per node", where=where, hint=more)


def parse_count(value: object, what: str, *, where: str, hint: str = "") -> int:
    """Read a whole number from 1 on (``4``, ``"4"``)."""
    count = whole(value)
    if count is None or count < 1:
        raise TopologyError(
            f"{value!r:.60} is not a number of {what}",
            where=where,
            hint=f"give a whole number from 1 on{hint}",
        )
    return count
