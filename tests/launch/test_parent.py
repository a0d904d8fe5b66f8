"""The parent of a node's ranks, whose batch script is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# The test's own program acts for the script. A child of the parent has ended before that.
PARENT = """
import os, sys
from hpcddp.attempt import lost_script
from hpcddp.launch import parent
os.waitid(os.P_PID, os.posix_spawnp("true", ["true"], os.environ), os.WEXITED | os.WNOWAIT)
acting = "import sys, time; time.sleep(0.5); open(sys.argv[1], 'w').close()"
lost_script.command = lambda *_: [sys.executable, "-c", acting, sys.argv[1]]
parent._act_for_the_script(1, 1)
"""


def test_a_parent_waits_for_the_process_that_acts_for_the_script(tmp_path: Path) -> None:
    done = tmp_path / "done"
    env = {**os.environ, "HPCDDP_RUN_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", PARENT, str(done)], env=env, check=True, timeout=60)
    assert done.exists()  # the end of the step would have ended that process
