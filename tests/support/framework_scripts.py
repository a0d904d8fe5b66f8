"""Scripts of the frameworks, and what they print."""

import re

from sites import SUPPORT

FOLDER = SUPPORT / "frameworks"

SCRIPTS = sorted(path.name for path in FOLDER.glob("with_*.py"))

TRAINED = re.compile(r"^(\d): trained (\d) (\d) (\d+)$", re.MULTILINE)


def trained(ranks: int) -> list[tuple[str, ...]]:
    """What each of the ranks says: 64 samples in batches of 4."""
    return [(str(r), str(r), str(ranks), str(64 // 4 // ranks)) for r in range(ranks)]
