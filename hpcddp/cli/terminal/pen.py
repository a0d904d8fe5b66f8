"""Parts of the picture of a run: safe text, rules, bars and curves, with widths in cells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from plotille import Canvas
from rich.cells import chop_cells
from rich.text import Text

from hpcddp.cli.terminal.shown import shown

BRAILLE = 0x2800  # the character without dots; each bit adds one
UPPER, LOWER = 0x1B, 0xE4  # dots of the upper and of the lower half


class Pen:
    """Draws on a terminal.

    Args:
        plain: only ASCII.
    """

    def __init__(self, plain: bool) -> None:
        self.plain = plain
        self.full, self.empty, self.line, self.cut = "#.-~" if plain else "█░─…"

    def safe(self, text: str) -> str:
        """One line without control characters."""
        return shown(text, self.plain)

    def text(self, *pieces: str | tuple[str, str]) -> Text:
        """A line of pieces, some of them with a style."""
        line = Text(no_wrap=True, overflow="crop")
        for piece in pieces:
            text, style = (piece, "") if isinstance(piece, str) else piece
            line.append(self.safe(text), style)
        return line

    def rule(self, title: str, width: int) -> Text:
        """The line above a part of the picture."""
        head = self.text((self.line + " ", "dim"), (title, "bold"), " ")
        return head.append(self.line * max(0, width - head.cell_len), "dim")

    def fit(self, text: Text, width: int, pad: int = 0) -> Text:
        """A line of at most a width, with a mark where it was cut, then spaces up to a column."""
        if text.cell_len > width:
            text = text.copy()
            text.truncate(max(0, width - 1), overflow="crop")
            text.append(self.cut)
        if pad > text.cell_len:
            text = text.copy()
            text.append(" " * (pad - text.cell_len))
        return text

    def folded(self, text: str, width: int) -> list[str]:
        """A name over several lines, so that nothing of it is cut."""
        return chop_cells(self.safe(text), max(2, width)) or [""]

    def curve(self, points: Sequence[tuple[int, float]], width: int, rows: int) -> list[str]:
        """A curve in braille dots, or in similar ASCII characters."""
        canvas = Canvas(width, rows, 0, 0, 2 * width, 4 * rows)
        dots = list(_dots(points, 2 * width - 1, 4 * rows - 1))
        for a, b in zip(dots, dots[1:] or dots, strict=False):
            canvas.line(*a, *b)
        lines = canvas.plot("\n").split("\n")
        if self.plain:
            return ["".join(map(_near, line)) for line in lines]
        return [line.replace(chr(BRAILLE), " ") for line in lines]


def _dots(
    points: Sequence[tuple[int, float]], width: int, height: int
) -> Iterator[tuple[float, float]]:
    """Points in dots. The values are halved: so the differences of the largest are finite."""
    steps = [step for step, _ in points]
    values = [value / 2 for _, value in points]
    low, high = min(values), max(values)
    first, last = steps[0], steps[-1]
    for step, value in zip(steps, values, strict=True):
        yield (
            width * (step - first) / (last - first or 1),
            height * ((value - low) / (high - low) if high > low else 0.5),
        )


def _near(character: str) -> str:
    """The ASCII character that resembles a braille character."""
    dots = ord(character) - BRAILLE if character != " " else 0
    return {(False, False): " ", (True, False): "'", (False, True): "."}.get(
        (bool(dots & UPPER), bool(dots & LOWER)), ":"
    )


def span(seconds: float) -> str:
    """A duration as Slurm writes it: m:s, h:m:s or d-h:m:s; below a minute with a unit, 12 s."""
    whole = int(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}-{hours:02}:{minutes:02}:{rest:02}"
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}" if minutes else f"{rest} s"
