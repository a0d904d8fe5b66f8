"""Reads Slurm host lists: ``n[1-3,05],login1`` has five names.

Commas separate the names; brackets hold numbers and ranges; several brackets in one name count
like an odometer, the rightmost fastest; a range is as wide as its first number, so ``[08-10]`` is
08, 09, 10. Order and repetition are kept, as a host's position is its node number.
hostlist_writer.py writes such lists.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpcddp.errors import TopologyError

LIMIT = 1_000_000
"""The most hosts in one list."""

DIGITS = 18  # the most in brackets
CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-"
_HINT = "write host lists as Slurm does: n[1-3,05],gpu[01-02]x[1-2],login1"

if TYPE_CHECKING:  # Python 3.9 has no `|` of types
    _Span = tuple[int, int, int]  # first number, last number, width
    _Part = list[str | list[_Span]]  # a name with its brackets: text and numbers, in turn


def expand_hosts(hostlist: str) -> list[str]:
    """The names in a host list, in its order; none in an empty one."""
    return [name for part in _parse(hostlist) for name in _names(part)]


def count_hosts(hostlist: str) -> int:
    """The number of names in a host list, without making them."""
    return sum(map(_size, _parse(hostlist)))


def nth_host(hostlist: str, index: int) -> str:
    """The name of node ``index``, counted from 0, without making the others."""
    left = index
    for part in _parse(hostlist) if index >= 0 else ():
        size = _size(part)
        if left < size:
            return _nth_name(part, left)
        left -= size
    raise TopologyError(
        f"no host {index} in {hostlist!r:.60}",
        where="host list",
        hint=f"its length is {count_hosts(hostlist)}, counted from 0",
    )


def first_host(hostlist: str) -> str:
    """The name of node 0, the host of the rendezvous."""
    return nth_host(hostlist, 0)


def _parse(text: str) -> list[_Part]:
    """Check a whole host list, and its size, before any name is made."""
    if strange := text.strip(CHARACTERS + "[],"):
        raise _error(text, text.index(strange), f"{strange[0]!r} is not allowed in a host list")
    parts: list[_Part] = []
    start = total = 0
    for end in _ends(text) if text else ():
        parts.append(_part(text, start, end))
        total += _size(parts[-1])
        if total > LIMIT:
            raise _error(text, start, f"more than {LIMIT:,} hosts")
        start = end + 1
    return parts


def _ends(text: str) -> Iterator[int]:
    """The ends of the parts: commas outside brackets, and the end of the text."""
    at, inside = 0, False
    for piece in text.split(","):
        opened, closed = piece.rfind("["), piece.rfind("]")
        if opened != closed:
            inside = opened > closed
        at += len(piece)
        if not inside:
            yield at
        at += 1
    if inside:
        yield len(text)


def _part(text: str, start: int, end: int) -> _Part:
    """Cut one part into text and numbers."""
    if start == end or text[start] == "-":
        raise _error(text, start, "empty part" if start == end else "a name must not start with -")
    part: _Part = []
    while start < end:  # the first piece is always text, maybe empty
        opened = text.find("[", start, end)
        literal = text[start : end if opened < 0 else opened]
        if "]" in literal:
            raise _error(text, start + literal.index("]"), "']' without a '['")
        part.append(literal)
        if opened < 0:
            break
        closed = text.find("]", opened, end)
        if closed < 0:
            raise _error(text, opened, "'[' without a ']'")
        part.append(_spans(text, opened + 1, closed))
        start = closed + 1
    return part


def _spans(text: str, start: int, end: int) -> list[_Span]:
    """The numbers and ranges inside one pair of brackets."""
    spans: list[_Span] = []
    for item in text[start:end].split(","):
        if "[" in item:
            raise _error(text, start + item.index("["), "brackets inside brackets")
        low, dash, high = item.partition("-")
        high = high if dash else low
        if not (low.isdigit() and high.isdigit()) or max(len(low), len(high)) > DIGITS:
            raise _error(text, start, f"{item!r:.30} is neither a number nor a range")
        if int(high) < int(low):
            raise _error(text, start, f"the range {item} is descending")
        if high.startswith("0") and len(high) != len(low):
            raise _error(text, start, f"the ends of {item} are padded differently")
        spans.append((int(low), int(high), len(low)))
        start += len(item) + 1
    return spans


def _error(text: str, at: int, why: str) -> TopologyError:
    near = text[max(0, at - 10) : at + 30]
    return TopologyError(
        f"{why}, at character {at + 1}, near {near!r}", where="host list", hint=_HINT
    )


def _count(spans: list[_Span]) -> int:
    return sum(high - low + 1 for low, high, _ in spans)


def _size(part: _Part) -> int:
    if len(part) == 1:  # a plain name; a list may hold thousands of them
        return 1
    return math.prod(_count(piece) for piece in part if not isinstance(piece, str))


def _names(part: _Part) -> list[str]:
    names = [""]
    for piece in part:
        endings = [piece] if isinstance(piece, str) else _numbers(piece)
        names = [name + ending for name in names for ending in endings]
    return names


def _numbers(spans: list[_Span]) -> list[str]:
    return [f"{number:0{width}d}" for low, high, width in spans for number in range(low, high + 1)]


def _nth_name(part: _Part, index: int) -> str:
    """Read ``index`` as the odometer that the brackets are, from the right."""
    name = ""
    for piece in reversed(part):
        if isinstance(piece, str):
            name = piece + name
            continue
        index, step = divmod(index, _count(piece))
        for low, high, width in piece:
            if step <= high - low:
                name = f"{low + step:0{width}d}{name}"
                break
            step -= high - low + 1
    return name
