"""The Python and the packages of a command, and their changes since the submission."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LOOK = """
import json, sys
from importlib.metadata import distributions
packages = {d.metadata["Name"]: d.version for d in distributions() if d.metadata["Name"]}
version = ".".join(map(str, sys.version_info[:3]))
print(json.dumps({"executable": sys.executable, "python": version, "packages": packages}))
"""
TIMEOUT = 60  # seconds


def installed(program: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Executable, version and packages of a Python, or of this Python for another program; empty
    without an answer."""
    is_python = Path(program).name.startswith("python")
    python = shutil.which(program, path=environ.get("PATH")) if is_python else None
    return ask(python or sys.executable, LOOK, environ, folder=os.sep)


def ask(
    python: str, text: str, environ: Mapping[str, str], folder: str | None = None
) -> dict[str, Any]:
    """The JSON that a program prints in a Python; empty without an answer.

    Args:
        folder: where it runs, and from where it imports.
    """
    try:
        done = subprocess.run(
            [python, "-c", text],
            capture_output=True, check=True, timeout=TIMEOUT, env=environ, cwd=folder,
        )  # fmt: skip
        facts: dict[str, Any] = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return {}
    return facts


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The differences, a text each: `torch 2.12.0 -> 2.13.0`."""
    if not before or not now:
        return []
    rows = [("Python", before["python"], now["python"])]
    names = sorted({*before["packages"], *now["packages"]}, key=str.lower)
    rows += [(n, before["packages"].get(n, "-"), now["packages"].get(n, "-")) for n in names]
    return [f"{name} {old} -> {new}" for name, old, new in rows if old != new]
