"""Queries about a job's model, in a separate process with torch and the user's code.

``ask`` starts a module of the train half, whose ``main`` calls ``answer``. It sends one JSON object
on stdin, and gets one from stdout. The plan half itself imports neither torch nor the user's code.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from hpcddp import spec
from hpcddp.spec import JobSpec


class NoAnswer(Exception):
    """The process ended without an answer; the text is its last line of output."""


def ask(
    module: str, job: JobSpec, folder: Path, asked: dict[str, Any], timeout: float | None = None
) -> dict[str, Any]:
    """The answer of a module, in the job's environment. Its "error", if any, has the parts of an
    HpcddpError.

    Args:
        folder: where the job works.
        asked: the question, without the job and its folder.
        timeout: seconds; None for no limit.

    Raises:
        NoAnswer: the process failed, or did not answer in time.
    """
    question = {"spec": spec.to_dict(job), "workdir": str(folder), **asked}
    environ = {**os.environ, **{name: str(value) for name, value in job.env.items()}}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", module], input=json.dumps(question),
            capture_output=True, encoding="utf-8", errors="replace",
            env=environ, cwd=folder, check=False, timeout=timeout,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"no answer in {timeout:g} s") from None
    if done.returncode or not done.stdout:
        raise NoAnswer((done.stderr.strip().splitlines() or ["the process printed nothing"])[-1])
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
