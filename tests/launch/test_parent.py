"""The parent of a node's ranks, whose batch script is lost."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcddp.sandbox import own_processes

# The test's own program acts for the script. A child of the parent has ended before that.
PARENT = """
import os, sys
from hpcddp.attempt import lost_script
from hpcddp.launch import parent
os.waitid(os.P_PID, os.posix_spawnp("true", ["true"], os.environ), os.WEXITED | os.WNOWAIT)
lost_script.command = lambda *_: [sys.executable, "-c", *sys.argv[1:]]
parent._act_for_the_script(1, 1)
"""
ACTING = """
import os, sys, time
os.chdir(sys.argv[1])
open("acts", "w").close()
while not os.path.exists("go"):
    time.sleep(0.02)
open("done", "w").close()
"""


def test_a_parent_waits_for_the_process_that_acts_for_the_script(tmp_path: Path) -> None:
    """Neither of the two is a rank."""
    task = {"HPCDDP_RUN_DIR": str(tmp_path), "SLURM_STEP_ID": "0", "SLURM_PROCID": "1"}
    words = [sys.executable, "-c", PARENT, ACTING, str(tmp_path)]
    with subprocess.Popen(words, env={**os.environ, **task}) as parent:
        while not (tmp_path / "acts").exists():
            assert parent.poll() is None
            time.sleep(0.02)
        try:
            with pytest.raises(subprocess.TimeoutExpired):  # its end would end the other one
                parent.wait(0.5)
            assert own_processes.of_steps(str(tmp_path)) == []
        finally:
            (tmp_path / "go").touch()
    assert parent.returncode == 0 and (tmp_path / "done").exists()
