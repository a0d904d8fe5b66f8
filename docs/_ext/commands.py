"""Every command, through sphinx-click, in the groups of `hpcddp --help`."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
from sphinx.application import Sphinx

from hpcddp import cli


def __getattr__(name: str) -> click.Command:
    """A command itself, by its name: sphinx-click looks for it here."""
    try:
        entry = cli.cli.commands[name]
    except KeyError:
        raise AttributeError(name) from None
    return entry.load()


def text() -> Iterator[str]:
    """Every command below the heading of its group."""
    for group, names in cli.GROUPS.items():
        yield from (f"## {group}", "")
        for name in names:
            yield from (f"(command-{name})=", "```{eval-rst}", f".. click:: commands:{name}")
            yield from (f"   :prog: hpcddp {name}", "   :nested: full", "```", "")


def grouped(app: Sphinx, context: click.Context, lines: list[str]) -> None:
    """Put the options below the titles that help gives them."""
    chunks: list[list[str]] = []
    for line in lines:
        if line.startswith(".. option::"):
            chunks.append([])
        chunks[-1].append(line)
    shown = [option for option in context.command.params if isinstance(option, click.Option)]
    sections: dict[str, list[str]] = {}
    for option, chunk in zip((o for o in shown if not o.hidden), chunks, strict=True):
        sections.setdefault(getattr(option, "section", ""), []).extend(chunk)
    lines.clear()
    for title, rows in sections.items():
        lines += [*([f"*{title}*", ""] if title else []), *rows]


def plain(app: Sphinx, context: click.Context, lines: list[str]) -> None:
    """Help is plain text, with code between backticks: change what reStructuredText would read."""
    for i, line in enumerate(lines):
        if not line.lstrip().startswith((".. ", ":")):
            pieces = line.split("`")
            pieces[::2] = (re.sub(r"([\\*_|])(?!\s)", r"\\\1", text) for text in pieces[::2])
            lines[i] = "``".join(pieces)
