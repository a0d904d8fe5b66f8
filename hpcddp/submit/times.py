"""Times as people and programs read them: always with their zone."""

from __future__ import annotations

import time
from datetime import datetime


def shown(moment: float | str) -> str:
    """A time for a person, in the zone of this machine: 2026-11-24 09:15:02 UTC.

    Args:
        moment: seconds since the epoch, or what `iso` returned; a time without a zone, which older
            versions wrote, is local. An empty text stays empty.
    """
    if not moment:
        return ""
    try:
        when = seconds(moment) if isinstance(moment, str) else moment
    except ValueError:
        return str(moment)
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(when))


def iso(when: float) -> str:
    """A time for programs, in ISO 8601 with its offset: 2026-11-24T09:15:02+00:00.

    Args:
        when: seconds since the epoch.
    """
    return datetime.fromtimestamp(int(when)).astimezone().isoformat()


def seconds(text: str) -> float:
    """Seconds since the epoch of a time in ISO 8601; one without an offset is local.

    Raises:
        ValueError: it is no such time.
    """
    return datetime.fromisoformat(text).timestamp()
