"""Scripts of the frameworks run unmodified, on this machine."""

import re
import sys
from pathlib import Path

import pytest
from conftest import Site
from test_local import Command, until

FOLDER = Path(__file__).with_name("frameworks")
SCRIPTS = sorted(path.name for path in FOLDER.glob("with_*.py"))
TRAINED = re.compile(r"^(\d): trained (\d) (\d) (\d+)$", re.MULTILINE)


def trained(ranks: int) -> list[tuple[str, ...]]:
    """What each of the ranks says: 64 samples in batches of 4."""
    return [(str(r), str(r), str(ranks), str(64 // 4 // ranks)) for r in range(ranks)]


@pytest.mark.parametrize("gpus", ["1", pytest.param("4", marks=pytest.mark.full)])
@pytest.mark.parametrize("script", SCRIPTS)
def test_it_trains_on_two_virtual_nodes(
    site: Site, command: Command, script: str, gpus: str
) -> None:
    words = ("2", gpus) if script == "with_lightning.py" else ()
    path = str(FOLDER / script)
    size = ("--nodes", "2", "--gpus", gpus, "--detach")
    done = command("submit", *size, "--", sys.executable, path, *words)
    assert done.code == 0, done.text
    until(command, lambda s: s["state"] == "COMPLETED")
    assert sorted(TRAINED.findall(command("logs").out)) == trained(2 * int(gpus))
