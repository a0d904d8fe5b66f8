"""What `hpcddp cluster detect` and `hpcddp init` say beside the profile that they write."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from hpcddp.cli.terminal import say

if TYPE_CHECKING:
    from hpcddp.planning.site.detected import Detected


def show(site: Detected) -> None:
    """Print which values of a person stay, what is unknown, and what may go wrong."""
    for change in site.profile.kept:
        kept = "no value" if change.kept is None else json.dumps(change.kept)
        say.note(f"kept your {change.key}: {kept} (detected: {json.dumps(change.detected)})")
    for part, reason in site.facts.unread.items():
        say.note(f"unknown: {part} ({reason})")
    for text in site.warnings():
        say.warning(text)
