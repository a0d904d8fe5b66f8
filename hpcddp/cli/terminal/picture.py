"""A run's view as lines that fit a terminal.

``picture`` returns an object that rich prints; a script may record it, for example as an SVG image.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Group
from rich.text import Text

from hpcddp.cli.terminal import say
from hpcddp.cli.terminal.grid import ranks
from hpcddp.cli.terminal.pen import Pen, span
from hpcddp.observe.view import AttemptView, View
from hpcddp.sizes import counted
from hpcddp.submit import times
from hpcddp.submit.status import Status

WIDE = 120  # columns from which curve and ranks stand side by side
SKIP = ("lr", "samples_per_s", "step_s", "wait_s", "grad_norm")  # not drawn as curves
LABEL = 9  # columns for the numbers beside a curve


@dataclass
class Part:
    """A part of the picture with a number of rows between least and most."""

    draw: Callable[[int, int], list[Text]]  # of columns and rows
    least: int
    most: int
    weight: int  # of its share in the remaining rows


def picture(view: View, width: int, height: int, *, plain: bool = False, hint: str = "") -> Group:
    """A picture of a run with at most this width and height.

    Args:
        plain: in ASCII alone.
        hint: the key that quits, where there is one.
    """
    pen = Pen(plain)
    lines = _head(pen, view, width, hint)
    rows = height - len(lines)
    top = _parts(pen, view, width)
    if width >= WIDE and len(top) > 1:
        left = width * 11 // 20
        last = [top.pop()] if view.log else []
        beside = [_beside(pen, top[:-1], top[-1], left)]
        lines += stacked([*beside, *last], width, rows)
    else:
        lines += stacked(top, width, rows)
    return Group(*(pen.fit(line, width) for line in lines[:height]))


def _parts(pen: Pen, view: View, width: int) -> list[Part]:
    """The parts that have anything to show: attempts, curve, ranks, log."""
    parts = []
    if not view.attempts and not view.log:
        parts.append(Part(lambda w, h: _waiting(pen, view, w), 1, 2, 1))
    if view.attempts:
        most = len(view.attempts) + 1
        parts.append(Part(lambda w, h: _attempts(pen, view, w, h), 2, most, 2))
    if width > LABEL and (name := _drawn(view)):
        parts.append(Part(lambda w, h: _curve(pen, view, name, w, h), 5, 26, 3))
    if view.ranks:
        least = 2 + min(2, sum(rank.state != "" for rank in view.ranks))
        most = len(ranks(pen, view, width, 40))
        parts.append(Part(lambda w, h: ranks(pen, view, w, h), least, most, 4))
    if view.log:
        most = len(view.log) + 1
        parts.append(Part(lambda w, h: _log(pen, view, w, h), 2, most, 2))
    return parts


def stacked(parts: Sequence[Part], width: int, rows: int) -> list[Text]:
    """Parts one above the other; the last ones are left out if they do not fit."""
    parts = list(parts)
    while parts and sum(part.least for part in parts) > rows:
        parts.pop()
    given = [part.least for part in parts]
    for _ in range(rows - sum(given)):
        open_ = [i for i, part in enumerate(parts) if given[i] < part.most]
        if not open_:
            break
        given[min(open_, key=lambda i: given[i] / parts[i].weight)] += 1
    return [
        line
        for part, share in zip(parts, given, strict=True)
        for line in part.draw(width, share)[:share]
    ]


def _beside(pen: Pen, left: list[Part], right: Part, at: int) -> Part:
    """Parts to the left of a column, and one to the right of it."""

    def draw(width: int, rows: int) -> list[Text]:
        mine, other = stacked(left, at - 2, rows), right.draw(width - at, rows)[:rows]
        size = max(len(mine), len(other))
        mine += [Text()] * (size - len(mine))
        other += [Text()] * (size - len(other))
        return [pen.fit(a, at - 2, pad=at) + b for a, b in zip(mine, other, strict=True)]

    least, most = sum(p.least for p in left), sum(p.most for p in left)
    return Part(draw, max(least, right.least), max(most, right.most), 5)


def _head(pen: Pen, view: View, width: int, hint: str) -> list[Text]:
    """The run's name, state, place, progress and speed."""
    status = view.status
    since = times.shown(status.since)
    today = times.shown(view.now)[:11]
    since = since.removeprefix(today)
    name = [Text(part, "bold") for part in pen.folded(status.run, width)]
    state = pen.text((status.state, f"{_colour(status)} bold".strip()))
    state += pen.text((f"  since {since}" if since else "", "dim"))
    if name[-1].cell_len + 2 + state.cell_len <= width:
        name[-1] = name[-1] + Text("  ") + state
    else:
        name.append(state)
    job = f"job {status.job_id} on {status.backend}, " if status.job_id else ""
    nodes = "1 node" if status.nodes == "1" else f"{status.nodes} nodes"  # it may be a range
    size = f"{nodes} x {counted(status.gpus_per_node, 'GPU')}"
    where = pen.text((f"{job}{size}" + (f", {status.hosts}" if status.hosts else ""), "dim"))
    why = {"PENDING": "waiting: "}.get(status.state, "") + status.reason if status.reason else ""
    why = f"last known state: {status.reason}" if status.stale else why
    reason = [pen.text((text, "yellow")) for text in textwrap.wrap(pen.safe(why), width)[:2]]
    rows = [_progress(pen, view, width), _figures(pen, view)]
    rows += [pen.text((text, "yellow")) for text in textwrap.wrap(pen.safe(view.hint), width)[:2]]
    for row in (name[-1], where) if hint else ():  # at the end of the first line with room for it
        if (room := width - row.cell_len - len(hint)) > 1:
            row.append(" " * room).append(hint, "dim")
            break
    return [*name, where, *reason, *(row for row in rows if row.cell_len)]


def _colour(status: Status) -> str:
    return say.STATES.get(status.state, "red" if status.final else "yellow")


def _progress(pen: Pen, view: View, width: int) -> Text:
    status = view.status
    if not status.total_steps:
        none = "" if status.final or not view.attempts else "no step recorded yet"
        return pen.text(f"step {status.step}" if status.step else none)
    share = min(1.0, status.step / status.total_steps)
    text = f" {status.step}/{status.total_steps}  {share:.0%}"
    text += f"  epoch {status.epoch}" if status.epoch else ""
    if view.to_go_s is not None and math.isfinite(view.to_go_s):
        text += f"  {span(view.to_go_s)} to go"
    size = max(0, width - len(text))
    full = int(size * share)
    return pen.text((pen.full * full, "green"), (pen.empty * (size - full), "dim"), text)


def _figures(pen: Pen, view: View) -> Text:
    """The newest figures that are known."""
    new, texts = view.newest, []
    for name, form in (("loss", "loss {:.4g}"), ("samples_per_s", "{:.4g} samples/s")):
        if name in new:
            texts.append(form.format(new[name]))
    if step := new.get("step_s"):
        texts.append(f"{step:.3g} s per step")
        if "wait_s" in new:
            texts.append(f"{new['wait_s'] / step:.0%} of it waiting for data")
    used = [rank.gpu for rank in view.ranks if rank.gpu is not None]
    texts += [f"GPU use {sum(used) / len(used):.0f} %"] if used else []
    texts += [f"{n.replace('/', ' ')} {v:.4g}" for n, v in new.items() if n.startswith("eval/")]
    return pen.text("  ".join(texts))


def _attempts(pen: Pen, view: View, width: int, rows: int) -> list[Text]:
    """The newest attempts, and the cost of all of them."""
    title = counted(len(view.attempts), "attempt")
    steps = _records_steps(view)
    if steps:
        title += f", {counted(view.lost_steps, 'step')} lost"
    if view.efficiency is not None:
        title += f", {view.efficiency:.0%} of {span(view.held_s)} useful"
    left_out = max(0, len(view.attempts) - (rows - 1))
    title += f"; newest {rows - 1}" if left_out else ""
    cells = [_cells(view, attempt, steps=steps) for attempt in view.attempts[left_out:]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))] if cells else []
    lines = [
        "  ".join(v.ljust(w) for v, w in zip(row, widths, strict=True)).rstrip() for row in cells
    ]
    return [pen.rule(title, width), *map(pen.text, lines)]


def _records_steps(view: View) -> bool:
    """Whether the program records its steps: a plain program does not."""
    return any(attempt.summary.last for attempt in view.attempts)


def _cells(view: View, attempt: AttemptView, *, steps: bool) -> list[str]:
    """An attempt's row of the table; without ``steps``, the columns about them are left out."""
    summary = attempt.summary
    ran = (summary.ended or view.now) - summary.began
    taken = f"steps {summary.first + 1}-{summary.last}"
    taken = taken if summary.last > summary.first else "no steps"
    return [
        f" {summary.attempt}",
        summary.cause or "running",
        *([taken, f"{summary.lost} lost"] if steps else []),
        f"ran {span(ran)}",
        f"waited {span(attempt.waited_s)}",
        (summary.hosts or "this machine")
        + (f"  in place {summary.recovery}" if summary.recovery else ""),
    ]


def _waiting(pen: Pen, view: View, width: int) -> list[Text]:
    """The line in place of the parts of a run that has not started."""
    submitted = view.status.state != "RENDERED"
    text = "no attempt has started yet" if submitted else "not submitted: this is only its script"
    return [pen.rule("attempts", width), pen.text((text, "dim"))]


def _drawn(view: View) -> str:
    """The name of the curve to draw: the loss, or the first curve of another program."""
    known = [name for name, (_, values) in view.curves.items() if any(map(math.isfinite, values))]
    usual = (name for name in ("loss", "log/loss", "eval/loss") if name in known)
    return next(usual, next(iter(known), ""))


def _curve(pen: Pen, view: View, name: str, width: int, rows: int) -> list[Text]:
    points = [(s, v) for s, v in zip(*view.curves[name], strict=True) if math.isfinite(v)]
    values = [value for _, value in points]
    low, high, first, last = min(values), max(values), points[0][0], points[-1][0]
    lines = pen.curve(points, width - LABEL, rows - 2)
    labels = [f"{high:.3g}", *[""] * (len(lines) - 2), f"{low:.3g}"][: len(lines)]
    drawn = [
        pen.text((f"{label:>{LABEL - 1}} ", "dim"), (text, "cyan"))
        for label, text in zip(labels, lines, strict=True)
    ]
    ends = f"{' ' * LABEL}{first}"
    ends += f"{last}".rjust(width - len(ends))
    return [pen.rule(name.removeprefix("log/"), width), *drawn, pen.text((ends, "dim"))]


def _log(pen: Pen, view: View, width: int, rows: int) -> list[Text]:
    return [pen.rule("log", width), *map(pen.text, view.log[-(rows - 1) :])]
