"""What a program of a run told of itself."""

import json

from sites import Site


def told(site: Site, rank: int) -> dict[str, object]:
    found: dict[str, object] = json.loads((site.folder / f"told-{rank}").read_text())
    return found
