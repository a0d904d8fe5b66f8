"""The documentation site, built for tests as scripts/docs builds it."""

import subprocess
import sys
from pathlib import Path

import pytest
from sites import CHECKOUT

DOCS = CHECKOUT / "docs"
WORDS = ("-m", "sphinx", "-b", "html", "-E", "-W", "--keep-going", "-q")


def build(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, *WORDS, source, target]
    return subprocess.run(words, capture_output=True, text=True, timeout=280, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site; its build has nothing to say."""
    target = tmp_path_factory.mktemp("site")
    done = build(DOCS, target)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return target
