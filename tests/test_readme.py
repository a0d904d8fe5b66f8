"""README is short, its links lead somewhere, and its own examples do what it says.

Its blocks are followed, as those of all pages, by tests/docs/test_pages.py.
"""

import re
from pathlib import Path

import pytest
from sites import CHECKOUT

MOST = 14 * 1024  # bytes
README = CHECKOUT / "README.md"
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} (.+?) *$", re.MULTILINE)
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The places of a page, as GitHub names them."""
    headings = HEADING.findall(FENCE.sub("", page.read_text(encoding="utf-8")))
    words = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {text.replace(" ", "-") for text in words}


def broken(page: Path) -> list[str]:
    """The links of a page that lead to no file, or to no place in it."""
    wrong = []
    for link in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        path, _, place = link.partition("#")
        target = page.parent / path if path else page
        if re.match(r"[a-z]+:", link):
            continue
        if not target.exists() or (place and place not in anchors(target)):
            wrong.append(link)
    return wrong


def test_it_is_short() -> None:
    assert README.stat().st_size <= MOST


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_its_links_lead_somewhere(name: str) -> None:
    """Also those of the pages beside it, which are no part of the site."""
    assert broken(CHECKOUT / name) == []


def test_a_link_that_leads_nowhere_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text("# A title: `x`\n[1](#a-title-x) [2](#b) [3](c.md) [4](https://x.org/#y)\n")
    assert broken(page) == ["#b", "c.md"]
