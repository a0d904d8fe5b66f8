"""At the end of each build: every link inside the site leads to a file, and to a place in it."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from sphinx.application import Sphinx
from sphinx.util import logging

LOG = logging.getLogger(__name__)
ATTRIBUTES = ("href", "src", "srcset", "poster")


class Page(HTMLParser):
    """The links of a page, and the places in it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.places: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.places.add(value)
            if name in ATTRIBUTES and value:
                self.links.append(value)


def broken(site: Path) -> Iterator[str]:
    """Each link of a built site that leads nowhere in it."""
    pages = {path: Page(path) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        for link in dict.fromkeys(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            place = unquote(parts.fragment)
            if not target.is_file():
                yield f"{path.relative_to(site)}: {link}: there is no such file"
            elif place and target in pages and place not in pages[target].places:
                yield f"{path.relative_to(site)}: {link}: there is no such place"


def check(app: Sphinx, error: Exception | None) -> None:
    if error is None and app.builder.format == "html":
        for line in broken(Path(app.outdir).resolve()):
            LOG.warning(line, type="inner_links")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("build-finished", check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
