"""Every block of README and of the site's pages is followed as a reader would do it."""

from pathlib import Path

import page_reader
import pages
import pytest
from page_reader import Reader
from pages import Block
from sites import Site

PAGES = pages.pages()
# Pages that train again what tests of their own subjects train in each run.
SUBJECTS = ("accelerate", "dask", "fsdp", "horovod", "lightning", "strategies", "transformers",
            "watching", "weights")  # fmt: skip
LONG = {f"docs/howto/{name}.md" for name in SUBJECTS}
MOST_NOT_RUN = 10  # blocks that need another cluster, an account or the network


def all_blocks() -> list[Block]:
    return [block for page in PAGES for block in pages.blocks(page)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", [
    pytest.param(p, id=pages.name(p), marks=pytest.mark.full if pages.name(p) in LONG else ())
    for p in PAGES if pages.blocks(p)
])  # fmt: skip
def test_the_blocks_of_a_page_do_what_it_says(site: Site, page: Path) -> None:
    """Those that need the sandbox: tests/slurm/test_pages.py."""
    Reader(site.folder.with_name("page"), page_reader.places(site)).follow(pages.blocks(page))


def test_each_block_can_be_followed() -> None:
    assert [problem for block in all_blocks() if (problem := pages.wrong(block))] == []


def test_few_blocks_are_not_run() -> None:
    left = [
        f"{block}: {block.marks['not run']}" for block in all_blocks() if "not run" in block.marks
    ]
    assert len(left) <= MOST_NOT_RUN, "\n".join(left)
