"""Pieces of Markdown, as MyST reads it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence


def sentence(text: str) -> str:
    """A line of a table of the code, as a sentence: plain text, with code between backticks."""
    text = text.strip()
    if re.match(r"(?!hpcddp)[a-z-]+\b(?![.(=/])", text):  # no name of something
        text = text[:1].upper() + text[1:]
    text += "" if text.endswith((".", "!", "?")) else "."
    pieces = text.split("`")
    if len(pieces) % 2 == 0:
        return _plain(text)
    return "`".join(piece if i % 2 else _plain(piece) for i, piece in enumerate(pieces))


def _plain(text: str) -> str:
    """Text in which no character means anything to Markdown."""
    return re.sub(r"([\\`*_<>\[\]{}])", r"\\\1", text)


def code(text: str) -> str:
    """Code within a line."""
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def entry(kind: str, name: str, target: str, body: Iterable[str]) -> Iterator[str]:
    """An object of the site, with a target for links."""
    yield from (f"({target})=", f"```{{{kind}}} {name}", *body, "```", "")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """A table; a bar in a cell does not end it."""
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
    yield ""
