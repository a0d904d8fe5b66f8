"""The state of runs, from one process: a command for each look takes CPU time from the ranks."""

import atexit
import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SERVER = """
import json, sys
from pathlib import Path
from hpcddp.errors import HpcddpError
from hpcddp.submit import status, submission
for line in sys.stdin:
    root, name = json.loads(line)
    try:
        answer = status.status(submission.find(Path(root), name)).to_dict()
    except HpcddpError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer), flush=True)
"""
_processes: dict[tuple[str, ...], "RunStates"] = {}
_lock = threading.Lock()


class RunStates:
    """A process that answers as `hpcddp status --json` does, in an environment."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER], env=dict(environ), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def of(self, root: Path, run: str) -> dict[str, Any]:
        """The status of a run in a folder of runs."""
        assert self._process.stdin and self._process.stdout
        with self._lock:  # threads of a test share the process
            self._process.stdin.write(json.dumps([str(root), run]) + "\n")
            self._process.stdin.flush()
            answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        assert "error" not in answer, answer["error"]
        return answer

    def close(self) -> None:
        """End the process."""
        with self._process as process:
            process.kill()


def states(environ: Mapping[str, str]) -> RunStates:
    """The process for an environment."""
    key = tuple(environ.get(name, "") for name in ("SLURM_CONF", "PATH"))
    with _lock:
        if key not in _processes:
            _processes[key] = RunStates(environ)
        return _processes[key]


@atexit.register
def close_all() -> None:
    """End all of them."""
    while _processes:
        _processes.popitem()[1].close()
