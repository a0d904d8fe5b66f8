"""Something that a check-up found, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

ERROR, WARNING = "error", "warning"


class CheckFinding(NamedTuple):
    """Something that makes a job fail, or slow.

    Args:
        level: `error` for what makes jobs fail, `warning` for the rest.
        where: `here` for this machine, else hosts.
        what: of one line.
        hint: what to do.
    """

    level: str
    where: str
    what: str
    hint: str


def merged(findings: Iterable[CheckFinding]) -> list[CheckFinding]:
    """The same finding of several hosts in one, errors first."""
    hosts: dict[tuple[str, str, str], list[str]] = {}
    for level, where, what, hint in findings:
        hosts.setdefault((level, what, hint), []).append(where)
    rows = [
        CheckFinding(level, ", ".join(dict.fromkeys(names)), what, hint)
        for (level, what, hint), names in hosts.items()
    ]
    return sorted(rows, key=lambda row: row.level != ERROR)
