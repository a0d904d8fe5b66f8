"""README is short, its links lead somewhere, and its own examples do what it says.

Its blocks are followed, as those of all pages, by tests/docs/test_pages.py.
"""

import re
from configparser import ConfigParser
from importlib.metadata import version
from pathlib import Path

import pytest
from sites import CHECKOUT

import hpcddp

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


SETUP = ConfigParser()
SETUP.read(CHECKOUT / "setup.cfg")
# What the tests run with: scripts/install takes this Python first, and these packages.
PYTHON = re.findall(r"command -v (?:python(3\.\d+))", (CHECKOUT / "scripts/install").read_text())[0]
TORCH = re.findall(r"^torch==(\S+)$", (CHECKOUT / "constraints.txt").read_text(), re.MULTILINE)[0]


def least(package: str) -> str:
    """The oldest version of a package, or of Python, that setup.cfg allows."""
    options = SETUP["options"]
    lines = [f"python{options['python_requires']}", *options["install_requires"].split()]
    (version,) = [line.partition(">=")[2] for line in lines if line.startswith(f"{package}>=")]
    return version


def test_its_versions_are_those_of_the_package_and_of_the_tests() -> None:
    text = " ".join(README.read_text(encoding="utf-8").split())
    assert (
        f"needs Linux, Python {least('python')} or newer, and PyTorch {least('torch')} or newer. "
        f"The tests run with Python {PYTHON} and PyTorch {TORCH}; other versions are not tested."
    ) in text
    classifiers = re.findall(r":: Python :: (3\.\d+)", SETUP["metadata"]["classifiers"])
    assert classifiers == [PYTHON]


def test_so_are_those_of_the_faq() -> None:
    text = (CHECKOUT / "docs" / "faq.md").read_text(encoding="utf-8")
    assert f"| {least('python')} or newer; tested with {PYTHON} |" in text
    assert re.search(rf"\| PyTorch \| {least('torch')} or newer.*; tested with {TORCH} \|", text)


def test_the_torch_of_these_tests_is_the_pinned_one() -> None:
    assert version("torch").partition("+")[0] == TORCH


def test_a_citation_is_of_this_version() -> None:
    text = (CHECKOUT / "CITATION.cff").read_text(encoding="utf-8")
    facts = dict(re.findall(r"^([a-z-]+): (.+)$", text, re.MULTILINE))
    assert facts["version"] == hpcddp.__version__
    assert facts["license"] == SETUP["metadata"]["license"]
    assert {"cff-version", "message", "title", "type"} <= set(facts) and "authors:" in text
