"""Tables on a terminal: aligned columns, or blocks of lines where it is narrower than they are."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

Styles = Mapping[int, Callable[[str], str]]  # column -> a function that colours a cell of it

ENDLESS = 1 << 30  # columns of a file or a pipe
LEAST = 24  # columns that a wrapped text has at least


def columns() -> int:
    """The width of the terminal; a file or a pipe has no end."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else ENDLESS


def table(
    rows: Sequence[Sequence[str]], *, right: Collection[int] = (), styles: Styles | None = None,
    wrap: bool = False,
) -> Iterator[str]:  # fmt: skip
    """The lines of a table whose first row is its head.

    Args:
        right: the columns that are aligned to the right.
        styles: colours of columns, below the head.
        wrap: the last column holds sentences, which may take several lines.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    room = columns()
    before = sum(widths[:-1]) + 2 * len(widths[:-1])
    least = before + (LEAST if wrap else widths[-1])
    if least > room:
        for row in rows[1:]:
            yield from block(rows[0], row, room, styles)
        return
    for i, row in enumerate(rows):
        first, *rest = (textwrap.wrap(row[-1], room - before) if wrap else [row[-1]]) or [""]
        cells = [
            _aligned(cell, width, column in right, (styles or {}).get(column) if i else None)
            for column, (cell, width) in enumerate(zip([*row[:-1], first], widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
        yield from (" " * before + line for line in rest)


def _aligned(cell: str, width: int, right: bool, style: Callable[[str], str] | None) -> str:
    """A cell in its colour, with spaces around it: colours have no width."""
    space = " " * (width - len(cell))
    text = style(cell) if style else cell
    return space + text if right else text + space


def block(
    head: Sequence[str], row: Sequence[str], width: int, styles: Styles | None = None
) -> Iterator[str]:
    """A row as short lines: its first cell, then the others with their names."""
    yield row[0]
    line, used = "", 0
    for i, (name, cell) in enumerate(zip(head[1:], row[1:], strict=True), 1):
        size = len(name) + 1 + len(cell)
        if used and used + 2 + size > width:
            yield line
            line, used = "", 0
        if 2 + size > width:
            yield from wrapped(f"{name.lower()} {cell}", width, "    ")
            continue
        style = (styles or {}).get(i)
        line += f"  {name.lower()} {style(cell) if style else cell}"
        used += 2 + size
    if used:
        yield line


def wrapped(text: str, width: int = 0, indent: str = "  ") -> list[str]:
    """An indented text as lines no wider than the terminal. A word that is wider is not broken, so
    that it can be copied.

    Args:
        width: 0 for that of the terminal.
        indent: of the lines after the first.
    """
    return textwrap.wrap(text, width or columns(), initial_indent="  ", subsequent_indent=indent,
                         break_long_words=False, break_on_hyphens=False)  # fmt: skip


def fields(rows: Sequence[tuple[str, str]], *, whole: Collection[str] = ()) -> Iterator[str]:
    """Names with their values, wrapped at the width of the terminal.

    Args:
        whole: names whose values stay in one line, so that they can be copied.
    """
    indent = max(9, *(len(name) for name, _ in rows)) + 1
    for name, value in rows:
        line = f"{name:{indent}}{value}"
        if name in whole or len(line) <= columns():
            yield line
            continue
        yield from textwrap.wrap(line, columns(), subsequent_indent=" " * indent,
                                 break_long_words=False, break_on_hyphens=False)  # fmt: skip
