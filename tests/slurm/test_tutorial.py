"""The tutorial, followed command by command: it starts and ends a sandbox of its own."""

import os
import subprocess
import tempfile
from pathlib import Path

import pages
import pytest
from page_reader import BIN, Reader
from sites import CHECKOUT, COMMAND, FOREIGN

TUTORIAL = CHECKOUT / "docs" / "tutorial.md"


@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("slurm")  # skips it where there is no Slurm
def test_a_reader_of_the_tutorial_sees_what_it_says(pytestconfig: pytest.Config) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    # Not below pytest's own folder: its long path leaves no room for the daemons' sockets.
    with tempfile.TemporaryDirectory(prefix="hpcddp-", dir="/tmp") as parent:
        environ = kept | {"PATH": f"{BIN}:{kept['PATH']}", "OMP_NUM_THREADS": "1"}
        long = pytestconfig.getoption("--full")
        reader = Reader(Path(parent, "page"), {pages.SANDBOX: environ}, patient=long)
        try:
            reader.follow(pages.blocks(TUTORIAL))
        finally:
            home = environ | {"HOME": str(reader.home)}
            subprocess.run([COMMAND, "sandbox", "down"], env=home, check=False, timeout=120)
