"""Sandbox: its folder, and the lines that make a shell use it, or leave it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from hpcddp.errors import SandboxError
from hpcddp.sandbox.state import State, load


def default_folder() -> Path:
    """HPCDDP_SANDBOX, or the usual folder."""
    given = os.environ.get("HPCDDP_SANDBOX")
    return Path(given) if given else usual_folder()


def usual_folder() -> Path:
    """The folder of a user's sandbox, below XDG_STATE_HOME."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base, "hpcddp", "sandbox")


def command(folder: Path, verb: str) -> str:
    """A command on the sandbox of a folder, as a user types it."""
    other = folder != usual_folder().expanduser().resolve()
    return f"hpcddp sandbox {verb}" + (f" --folder {shlex.quote(str(folder))}" if other else "")


def entering(folder: Path) -> str:
    """The line that makes a shell use the sandbox."""
    return f'eval "$({command(folder, "env")})"'


def leaving(environ: Mapping[str, str], folder: Path) -> str:
    """The line after which a shell no longer uses the sandbox of a folder; "" if it does not."""
    state, conf = _state(folder), environ.get("SLURM_CONF", "")
    ended = conf and not Path(conf).exists() and environ.get("HPCDDP_SANDBOX") == str(folder)
    uses = ended or (state and state.site.slurm_conf == conf)
    return "unset SLURM_CONF HPCDDP_SANDBOX" if uses else ""


def reminder(environ: Mapping[str, str]) -> str:
    """A note for a shell that has no Slurm although a sandbox is up; "" where there is none."""
    if environ.get("SLURM_CONF"):
        return ""
    folder = default_folder().expanduser().resolve()
    state = _state(folder)
    if state is None or not state.ready or not state.alive():
        return ""
    return f"a sandbox is up, but this shell does not use it: run {entering(folder)}"


def _state(folder: Path) -> State | None:
    """The record of a sandbox; None where it cannot be read."""
    try:
        return load(folder)
    except SandboxError:
        return None
