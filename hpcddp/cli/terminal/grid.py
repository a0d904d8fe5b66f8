"""The ranks of a run in few rows: slow and dead ranks are marked, and explained in words.

The form depends on the space: a row for each node, cells with numbers, a sign for each rank, or
only the worst ranks and a count of the others.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from itertools import groupby

from rich.text import Text

from hpcddp.attempt.joblog import STEP
from hpcddp.cli.terminal.pen import Pen
from hpcddp.observe.view import RankView, View
from hpcddp.sizes import counted

MARKS = {"dead": ("X", "bold red"), "slow": ("S", "bold yellow")}  # not by colour alone
WELL = (".", "green")
ORDER = {"dead": 0, "slow": 1}
GROUP = 10  # signs between two gaps
WORDS = 5  # ranks that are explained in words, at most


def ranks(pen: Pen, view: View, width: int, rows: int) -> list[Text]:
    """The ranks in at most this many rows, with the title."""
    bad = [rank for rank in _worst(view) if rank.state][:WORDS]
    words = [line for rank in bad for line in _words(pen, rank, width)]
    words = words[: min(max(2, (rows - 1) // 3), max(0, rows - 2))]
    room = rows - 1 - len(words)
    title = counted(len(view.ranks), "rank")
    ended = bool(view.attempts and view.attempts[-1].summary.cause)
    for state, (mark, _) in {**MARKS, "": WELL}.items():
        count = sum(rank.state == state for rank in view.ranks)
        word = state or ("ended" if ended else "ok")
        title += f", {count} {word} ({mark})" if count else ""
    forms: tuple[Callable[..., list[Text] | None], ...] = (_by_node, _numbers, _signs)
    grid = next((g for form in forms if (g := form(pen, view, width, room)) is not None), None)
    if grid is None:
        grid = _some(pen, view, width, room)
    return [pen.rule(title, width), *grid, *words]


def _worst(view: View) -> list[RankView]:
    """The ranks: dead ones, slow ones, then the others, the slowest first."""

    def behind(rank: RankView) -> float:
        newest = view.heat[rank.rank][-1:] if rank.rank < len(view.heat) else []
        return (newest[0] if newest else None) or 0.0

    return sorted(view.ranks, key=lambda r: (ORDER.get(r.state, 2), -behind(r), r.rank))


def _cells(ranks: list[RankView], numbers: int) -> Iterator[tuple[str, str]]:
    """Each rank's sign, with its number before it if numbers have a width."""
    for rank in ranks:
        mark, style = MARKS.get(rank.state, WELL)
        yield (f"{rank.rank:>{numbers}}{mark} " if numbers else mark), style


def _digits(view: View) -> int:
    return len(str(max(rank.rank for rank in view.ranks)))


def _by_node(pen: Pen, view: View, width: int, rows: int) -> list[Text] | None:
    """A row for each node, with its name."""
    nodes = [list(ranks) for _, ranks in groupby(view.ranks, lambda rank: rank.node)]
    names = [pen.text(f"{ranks[0].host}  ") for ranks in nodes]
    label = max(name.cell_len for name in names)
    cell = _digits(view) + 2
    if len(nodes) > rows or label + cell * max(map(len, nodes)) > width:
        return None
    return [
        pen.fit(name, label, pad=label) + pen.text(*_cells(ranks, cell - 2))
        for name, ranks in zip(names, nodes, strict=True)
    ]


def _numbers(pen: Pen, view: View, width: int, rows: int) -> list[Text] | None:
    """Cells with numbers; those of a node side by side if they fit."""
    cell = _digits(view) + 2
    columns = width // cell
    node = sum(rank.node == view.ranks[0].node for rank in view.ranks)
    columns -= columns % node if 0 < node <= columns else 0
    if not columns or len(view.ranks) > rows * columns:
        return None
    cells = list(_cells(view.ranks, cell - 2))
    return [pen.text(*cells[i : i + columns]) for i in range(0, len(cells), columns)]


def _signs(pen: Pen, view: View, width: int, rows: int) -> list[Text] | None:
    """A sign for each rank, in tens, with the first one's number before each row."""
    label = _digits(view) + 1
    columns = (width - label + 1) // (GROUP + 1) * GROUP
    if columns <= 0 or len(view.ranks) > rows * columns:
        return None
    cells = list(_cells(view.ranks, 0))
    lines = []
    for i in range(0, len(cells), columns):
        line = pen.text((f"{view.ranks[i].rank:>{label - 1}} ", "dim"))
        for j in range(i, min(i + columns, len(cells)), GROUP):
            line += pen.text(*cells[j : min(j + GROUP, i + columns)], " ")
        lines.append(line)
    return lines


def _some(pen: Pen, view: View, width: int, rows: int) -> list[Text]:
    """The worst ranks, as many as fit, and the number of the others."""
    if rows < 1:
        return []
    cell = _digits(view) + 2
    columns = max(1, width // cell)
    longest = f"+{len(view.ranks)} not slow"  # the count of the others, at most
    size = max(0, rows * columns - -(-(len(longest) + 1) // cell))
    worst = _worst(view)
    cells = list(_cells(worst[:size], cell - 2))
    rest = worst[size:]
    well = "" if any(r.state for r in rest) else " not slow"
    lines = [pen.text(*cells[i : i + columns]) for i in range(0, len(cells), columns)]
    lines = lines or [Text()]
    lines[-1] = lines[-1] + pen.text((f"+{len(rest)}{well}", "dim"))
    return lines


def _words(pen: Pen, rank: RankView, width: int) -> list[Text]:
    """A slow or dead rank in words."""
    mark, style = MARKS[rank.state]
    note = STEP.sub("", rank.note.strip().partition("\n")[0])
    if rank.state == "slow" and not note and rank.busy_s is not None:
        note = f"{rank.busy_s:.3g} s of own work per step"
    who = f"rank {rank.rank} on {rank.host}"
    text = note if f"rank {rank.rank} " in note else f"{who}: {note or rank.state}"
    first, *rest = textwrap.wrap(pen.safe(text), max(10, width - 2)) or [""]
    return [pen.text((f"{mark} ", style), first), *(pen.text(f"  {line}") for line in rest)]
