"""Notes and warnings on stderr, and the colours of a terminal."""

from __future__ import annotations

import os
import sys
from typing import TextIO

import click

# State of a run -> its colour. Other final states are failures; other states are on their way.
STATES = {
    "COMPLETED": "green",
    "RUNNING": "green",
    "PENDING": "yellow",
    "STOPPED": "yellow",
    "CANCELLED": "yellow",
    "RENDERED": "",
}


def note(text: str) -> None:
    """Print a fact that the user should know."""
    _put("note:", "cyan", text)


def warning(text: str) -> None:
    """Print a fact that may cost the user something."""
    _put("warning:", "yellow", text)


def _put(label: str, colour: str, text: str) -> None:
    """Print a line to stderr."""
    line = f"{paint(label, colour, sys.stderr)} {text}"
    ctx = click.get_current_context(silent=True)
    if json_asked() and ctx:
        held = ctx.find_root().meta.get(__name__) or ctx.find_root().with_resource(Held(ctx))
        held.lines.append(line)
    else:
        click.echo(line, err=True)


class Held:
    """Lines for stderr that wait until a command with --json has succeeded: beside the JSON of an
    error stderr is empty."""

    def __init__(self, ctx: click.Context) -> None:
        self.lines: list[str] = []
        ctx.find_root().meta[__name__] = self

    def __enter__(self) -> Held:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.release()

    def release(self) -> None:
        """Print the lines."""
        while self.lines:
            click.echo(self.lines.pop(0), err=True)


def release() -> None:
    """Print the lines that wait, before a command goes on for a long time."""
    ctx = click.get_current_context(silent=True)
    if held := ctx and ctx.find_root().meta.get(__name__):
        held.release()


def json_asked() -> bool:
    """Whether --json is on the command line, before the words of a program."""
    words = sys.argv[1:]
    return "--json" in (words[: words.index("--")] if "--" in words else words)


def paint(text: str, colour: str, stream: TextIO | None = None) -> str:
    """The text in a colour, if the stream (stdout by default) is a terminal that shows colours."""
    if not colour or not coloured(stream or sys.stdout):
        return text
    return click.style(text, fg=colour, bold=True)


def paint_state(state: str, stream: TextIO | None = None) -> str:
    """The state of a run in its colour."""
    from hpcddp.submit.status import FINAL

    return paint(state, STATES.get(state, "red" if state in FINAL else "yellow"), stream)


def coloured(stream: TextIO) -> bool:
    """Whether a stream is a terminal with colours, and NO_COLOR does not forbid them."""
    dumb = os.environ.get("TERM", "") in ("", "dumb", "unknown")
    return stream.isatty() and not dumb and not os.environ.get("NO_COLOR")
