"""The blocks of README and of the site's pages that need a Slurm, on the tests' own sandbox."""

import subprocess
import tempfile
from pathlib import Path

import pages
import pytest
from page_reader import BIN, CHEAP, Reader
from sites import COMMAND

from .desk import Desk

TUTORIAL = "docs/tutorial.md"  # has a test and a sandbox of its own


def marked(page: Path) -> object:
    """A page with blocks for the sandbox; it is long where all of them are."""
    blocks = [block for block in pages.blocks(page) if block.where == pages.SANDBOX]
    long = all("long" in block.marks for block in blocks)
    return pytest.param(page, id=pages.name(page), marks=[pytest.mark.full] if long else [])


PAGES = [
    marked(page)
    for page in pages.pages()
    if pages.name(page) != TUTORIAL
    and any(block.where == pages.SANDBOX for block in pages.blocks(page))
]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_do_what_it_says(
    desk: Desk, page: Path, pytestconfig: pytest.Config
) -> None:
    environ = desk.slurm.environ | CHEAP
    environ["PATH"] = f"{BIN}:{environ['PATH']}"
    del environ["HPCDDP_LAUNCHER"]
    if own := "hpcddp sandbox up" in page.read_text():  # it must not end the one of the tests
        for name in ("HPCDDP_SANDBOX", "SLURM_CONF"):
            del environ[name]
    # A sandbox's sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="hpcddp-", dir="/tmp") as parent:
        folder = Path(parent, "page") if own else desk.folder / "page"
        patient = pytestconfig.getoption("--full")
        reader = Reader(folder, {pages.SANDBOX: environ}, patient=patient)
        try:
            reader.follow(pages.blocks(page))
        finally:
            if own:
                home = environ | {"HOME": str(reader.home)}
                down = [COMMAND, "sandbox", "down"]
                subprocess.run(down, env=home, check=False, timeout=120)
