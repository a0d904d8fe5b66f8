"""Scripts of the frameworks run unmodified, on this machine."""

import sys

import pytest
from framework_scripts import FOLDER, SCRIPTS, TRAINED, trained
from local_runs import Command, until
from sites import Site


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
