"""Numbers as a person writes and reads them: 80G is 80 x 1024^3 bytes, 1-4 is a range of nodes."""

from __future__ import annotations

import re
from typing import NamedTuple

from hpcddp.errors import TopologyError, UserError

UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}  # of 1024
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT]?)((?:i?B)?)", re.IGNORECASE)


def whole(value: object) -> int | None:
    """A whole number from 0 on, written in plain digits; None for anything else."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 18:
        return int(value)
    return value if type(value) is int and value >= 0 else None  # a bool is not a number here


def counted(count: int, noun: str, plural: str = "") -> str:
    """A number with its noun: ``1 node``, ``2 nodes``."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def bytes_of(
    text: str, where: str, *, what: str = "memory", zero: bool = False, bare: bool = False
) -> int:
    """A size such as 80G in bytes.

    Args:
        what: names the size in the error: ``memory``, ``cache``.
        zero: 0 is allowed and an empty text is not; otherwise an empty text means 0.
        bare: a number without a unit is allowed, in bytes.

    Raises:
        UserError: the text is not a size.
    """
    match = _SIZE.fullmatch(text.strip())
    if (text or zero) and not (match and (zero or float(match[1]))):
        raise UserError(f"invalid {what} size {text!r}", where=where,
                        hint="write a number and a unit, such as 80G")  # fmt: skip
    if match and float(match[1]) and not (match[2] or match[3] or bare):
        number = match[1]
        raise UserError(f"{what} size {text!r} has no unit", where=where,
                        hint=f"write {number}G for gigabytes, or {number}B for bytes")  # fmt: skip
    return int(float(match[1]) * 1024 ** UNITS[match[2].upper()]) if match else 0


def size(count: float) -> str:
    """Bytes for a table, in powers of 1024: three digits and a letter, such as 1.06G."""
    number, unit = _scaled(count)
    return f"{number}{unit or 'B'}"


def amount(count: float) -> str:
    """Bytes for a sentence, in powers of 1024: three digits and a unit, such as 1.06 GB."""
    number, unit = _scaled(count)
    return f"{number} {unit}B"


def _scaled(count: float) -> tuple[str, str]:
    power = 0
    while round(count) >= 1000 and power < len(UNITS) - 1:
        count, power = count / 1024, power + 1
    return f"{count:.0f}" if power == 0 or count >= 99.95 else f"{count:.3g}", list(UNITS)[power]


class NodeRange(NamedTuple):
    """The number of nodes: exactly ``max``, or any number from ``min`` to ``max``."""

    min: int
    max: int

    def __str__(self) -> str:
        return str(self.max) if self.min == self.max else f"{self.min}-{self.max}"


def parse_nodes(value: object, *, where: str = "nodes") -> NodeRange:
    """Read a number of nodes (``2``, ``"2"``) or a range of them (``"1-4"``)."""
    hint = "write a whole number from 1 on (2), or a range (1-4)"
    first, dash, last = value.partition("-") if isinstance(value, str) else (value, "", value)
    low, high = whole(first), whole(last if dash else first)
    if low is None or high is None:
        raise TopologyError(f"{value!r:.60} is not a number of nodes", where=where, hint=hint)
    if low < 1:
        raise TopologyError(f"{value!r} is less than 1 node", where=where, hint=hint)
    if high < low:
        raise TopologyError(f"the range {value!r} is reversed", where=where, hint=hint)
    return NodeRange(low, high)


def parse_gpus(value: object, *, where: str = "gpus") -> int:
    """Read a number of GPUs per node (``4``, ``"4"``)."""
    more = "; without GPUs it is the number of processes per node"
    return parse_count(value, "GPUs per node", where=where, hint=more)


def parse_count(value: object, what: str, *, where: str, hint: str = "") -> int:
    """Read a whole number from 1 on (``4``, ``"4"``)."""
    count = whole(value)
    if count is None or count < 1:
        raise TopologyError(
            f"{value!r:.60} is not a number of {what}",
            where=where,
            hint=f"write a whole number from 1 on{hint}",
        )
    return count
