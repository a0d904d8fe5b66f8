"""Scripts of the frameworks run unmodified, on the real Slurm."""

import sys

import pytest
from framework_scripts import FOLDER, SCRIPTS, TRAINED, trained

from .desk import Desk


@pytest.mark.parametrize("gpus", ["1", pytest.param("4", marks=pytest.mark.full)])
@pytest.mark.parametrize("script", SCRIPTS)
def test_it_trains_on_two_nodes(desk: Desk, script: str, gpus: str) -> None:
    words = ("2", gpus) if script == "with_lightning.py" else ()
    path = str(FOLDER / script)
    size = ("--nodes", "2", "--gpus", gpus)
    desk("submit", *size, "--follow", "--", sys.executable, path, *words)
    log = desk("logs")
    assert sorted(TRAINED.findall(log)) == trained(2 * int(gpus)), log
