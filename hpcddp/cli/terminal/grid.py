"""The ranks of a run in few rows: the slow and the dead marked, and what is wrong in words.

The form follows from the room: a row for each node, cells with numbers, a sign for each rank, or,
where not even that fits, the worst ranks first and a count of the others.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from itertools import groupby

from rich.text import Text

from hpcddp.attempt.joblog import STEP
from hpcddp.cli.terminal.pen import Pen
from hpcddp.observe.view import RankView, View

MARKS = {"dead": ("X", "bold red"), "slow": ("S", "bold yellow")}  # not by colour alone
WELL = (".", "green")
ORDER = {"dead": 0, "slow": 1}
GROUP = 10  # signs between two gaps
WORDS = 5  # ranks of which is told what is wrong, at most


def ranks(pen: Pen, view: View, width: int, rows: int) -> list[Text]:
    """The ranks in at most so many rows, the title among them."""
    bad = [row for row in _worst(view) if row.state][:WORDS]
    told = [line for row in bad for line in _told(pen, row, width)]
    told = told[: min(max(2, (rows - 1) // 3), max(0, rows - 2))]
    room = rows - 1 - len(told)
    title = f"ranks {len(view.ranks)}"
    for state, (mark, _) in MARKS.items():
        count = sum(row.state == state for row in view.ranks)
        title += f", {count} {state} ({mark})" if count else ""
    forms: tuple[Callable[..., list[Text] | None], ...] = (_by_node, _numbers, _signs)
    grid = next((g for form in forms if (g := form(pen, view, width, room)) is not None), None)
    if grid is None:
        grid = _some(pen, view, width, room)
    return [pen.rule(title, width), *grid, *told]


def _worst(view: View) -> list[RankView]:
    """The ranks: dead ones, slow ones, then the others, by how far they are behind."""

    def behind(row: RankView) -> float:
        told = view.heat[row.rank][-1:] if row.rank < len(view.heat) else []
        return (told[0] if told else None) or 0.0

    return sorted(view.ranks, key=lambda r: (ORDER.get(r.state, 2), -behind(r), r.rank))


def _cells(found: list[RankView], numbers: int) -> Iterator[tuple[str, str]]:
    """Ranks by sign, with the number before it where that has a width."""
    for row in found:
        mark, style = MARKS.get(row.state, WELL)
        yield (f"{row.rank:>{numbers}}{mark} " if numbers else mark), style


def _digits(view: View) -> int:
    return len(str(max(row.rank for row in view.ranks)))


def _by_node(pen: Pen, view: View, width: int, rows: int) -> list[Text] | None:
    """A row for each node, with its name."""
    nodes = [list(found) for _, found in groupby(view.ranks, lambda row: row.node)]
    names = [pen.text(f"{found[0].host}  ") for found in nodes]
    label = max(name.cell_len for name in names)
    cell = _digits(view) + 2
    if len(nodes) > rows or label + cell * max(map(len, nodes)) > width:
        return None
    return [
        pen.fit(name, label, pad=label) + pen.text(*_cells(found, cell - 2))
        for name, found in zip(names, nodes, strict=True)
    ]


def _numbers(pen: Pen, view: View, width: int, rows: int) -> list[Text] | None:
    """Cells with numbers, a node's side by side where they fit."""
    cell = _digits(view) + 2
    row = width // cell
    node = sum(found.node == view.ranks[0].node for found in view.ranks)
    row -= row % node if 0 < node <= row else 0
    if not row or len(view.ranks) > rows * row:
        return None
    cells = list(_cells(view.ranks, cell - 2))
    return [pen.text(*cells[i : i + row]) for i in range(0, len(cells), row)]


def _signs(pen: Pen, view: View, width: int, rows: int) -> list[Text] | None:
    """A sign for each rank, in tens, with the first one's number before each row."""
    label = _digits(view) + 1
    row = (width - label + 1) // (GROUP + 1) * GROUP
    if row <= 0 or len(view.ranks) > rows * row:
        return None
    cells = list(_cells(view.ranks, 0))
    lines = []
    for i in range(0, len(cells), row):
        line = pen.text((f"{view.ranks[i].rank:>{label - 1}} ", "dim"))
        for j in range(i, min(i + row, len(cells)), GROUP):
            line += pen.text(*cells[j : min(j + GROUP, i + row)], " ")
        lines.append(line)
    return lines


def _some(pen: Pen, view: View, width: int, rows: int) -> list[Text]:
    """The worst ranks, as many as fit, and how many more there are."""
    if rows < 1:
        return []
    cell = _digits(view) + 2
    row = max(1, width // cell)
    more = f"+{len(view.ranks)}"
    size = max(0, rows * row - -(-(len(more) + 1) // cell))
    found = _worst(view)
    cells = list(_cells(found[:size], cell - 2))
    rest = found[size:]
    well = "" if any(r.state for r in rest) else " well"
    lines = [pen.text(*cells[i : i + row]) for i in range(0, len(cells), row)] or [Text()]
    lines[-1] = lines[-1] + pen.text((f"+{len(rest)}{well}", "dim"))
    return lines


def _told(pen: Pen, row: RankView, width: int) -> list[Text]:
    """What is wrong with a rank, in as many lines as it takes."""
    mark, style = MARKS[row.state]
    note = STEP.sub("", row.note.strip().partition("\n")[0])
    if row.state == "slow" and not note and row.busy_s is not None:
        note = f"{row.busy_s:.3g} s of its own work a step"
    who = f"rank {row.rank} on {row.host}"
    text = note if f"rank {row.rank} " in note else f"{who}: {note or row.state}"
    first, *rest = textwrap.wrap(pen.safe(text), max(10, width - 2)) or [""]
    return [pen.text((f"{mark} ", style), first), *(pen.text(f"  {line}") for line in rest)]
