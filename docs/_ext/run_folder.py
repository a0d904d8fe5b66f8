"""The files of a run folder, from the tree that begins hpcddp/rundir.py."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from markdown import entry, sentence

from hpcddp import rundir


class Row(NamedTuple):
    """A file: its path below the run folder, what it holds, and who writes it."""

    path: str
    text: str
    writer: str


def rows() -> list[Row]:
    """The tree's rows, in its order."""
    return list(_rows(rundir.__doc__ or ""))


def text() -> Iterator[str]:
    """Every file, with a target."""
    for row in rows():
        body = [
            sentence(row.text),
            *(["", "{.facts}", sentence(row.writer)] if row.writer else []),
        ]
        yield from entry("run-file", row.path, f"run-{row.path.rstrip('/')}", body)


def _rows(tree: str) -> Iterator[Row]:
    lines = tree.split("RUN/\n", 1)[1].split("\n\n", 1)[0].splitlines()
    folders: list[tuple[int, str]] = []
    made: list[Row] = []
    for line in lines:
        indent = len(line) - len(line.lstrip())
        name, *rest = re.split(r"\s{2,}", line.strip())
        while folders and folders[-1][0] >= indent:
            folders.pop()
        path = "".join(folder for _, folder in folders) + name
        if name.endswith("/"):
            folders.append((indent, name))
        path, _, target = path.partition(" -> ")
        text = rest[0] if rest else f"link to `{target}`" if target else "folder"
        made.append(Row(path, text, " ".join(rest[1:])))
    yield from made
