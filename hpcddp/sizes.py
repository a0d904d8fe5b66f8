"""Sizes as a person writes them: 80G is 80 x 1024^3 bytes."""

from __future__ import annotations

import re

from hpcddp.errors import UserError

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
    found = _SIZE.fullmatch(text.strip())
    if (text or zero) and not (found and (zero or float(found[1]))):
        raise UserError(f"{text!r} is no size of {what}", where=where,
                        hint="write a number and a unit, such as 80G")  # fmt: skip
    return int(float(found[1]) * 1024 ** UNITS[found[2].upper()]) if found else 0


def size(count: float) -> str:
    """Bytes for a person, in powers of 1024: three digits and a unit."""
    power = 0
    while round(count) >= 1000 and power < len(UNITS) - 1:
        count, power = count / 1024, power + 1
    unit = list(UNITS)[power] or "B"
    return f"{count:.0f}{unit}" if power == 0 or count >= 99.95 else f"{count:.3g}{unit}"
