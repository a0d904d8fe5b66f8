"""Time limits in Slurm's forms."""

from __future__ import annotations

import re

from hpcddp.errors import UserError

_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", re.ASCII)


def seconds(text: str, where: str) -> float:
    """A time limit in Slurm's forms, in seconds: m, m:s, h:m:s, d-h, d-h:m, d-h:m:s.

    `0`, `UNLIMITED` and `INFINITE` are no limit: infinity. Source: sbatch(1), --time.
    """
    if text.upper() in ("UNLIMITED", "INFINITE", "0"):
        return float("inf")
    match = _TIME.fullmatch(text)
    if not match:
        raise UserError(
            f"invalid time limit {text!r}", where=where,
            hint="use minutes, m:s, h:m:s, d-h, d-h:m or d-h:m:s, such as 30 or 1-12:00:00",
        )  # fmt: skip
    days, first, second, third = (int(g) if g else None for g in match.groups())
    if days is not None:
        return days * 86400 + (first or 0) * 3600 + (second or 0) * 60 + (third or 0)
    if third is not None:
        return (first or 0) * 3600 + (second or 0) * 60 + third
    return (first or 0) * 60 + (second or 0)
