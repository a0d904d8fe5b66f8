"""What a process is known by."""

import subprocess
import sys
import time

from hpcddp import processes


def test_a_process_is_known_by_its_start() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert processes.start_of(child.pid) not in ("", processes.start_of(1))
        assert child.stdin
        child.stdin.close()
        while processes.start_of(child.pid):  # a zombie works no more
            time.sleep(0.01)
    finally:
        child.kill()
        child.wait()
    assert processes.start_of(child.pid) == ""
