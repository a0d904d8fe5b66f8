"""Sandbox: its record, `sandbox.json` in its folder, and the lock to change it."""

import fcntl
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hpcddp.errors import SandboxError
from hpcddp.sandbox.config import SandboxSite, Settings
from hpcddp.sandbox.own_processes import OwnProcess

NAME = "sandbox.json"


@dataclass
class State:
    settings: Settings
    site: SandboxSite
    daemons: dict[str, OwnProcess] = field(default_factory=dict)
    ready: bool = False  # all nodes have been idle once

    @property
    def nodes(self) -> list[str]:
        return self.site.node_names(self.settings.nodes)

    def alive(self) -> list[str]:
        return [name for name, process in self.daemons.items() if process.alive()]

    def ended(self) -> list[str]:
        return sorted(self.daemons.keys() - set(self.alive()))

    def save(self, folder: Path) -> None:
        aside = folder / f"{NAME}.new"
        aside.write_text(json.dumps(asdict(self), indent=1))
        aside.replace(folder / NAME)


def load(folder: Path) -> State | None:
    """The record of this folder, or None.

    It names processes to kill, so only the user may own it and be able to write it.
    """
    try:
        facts = (folder / NAME).lstat()
        text = (folder / NAME).read_text()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise SandboxError(f"cannot be read: {error.strerror}", where=str(folder)) from error
    if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
        message = "this record belongs to another user, or another user can write it"
        raise SandboxError(message, where=str(folder / NAME), hint="choose another --folder")
    try:
        raw = json.loads(text)
        daemons = {
            name: OwnProcess(entry["pid"], entry["started"], tuple(entry["argv"]))
            for name, entry in raw["daemons"].items()
        }
        return State(Settings(**raw["settings"]), SandboxSite(**raw["site"]), daemons, raw["ready"])
    except (ValueError, TypeError, KeyError) as error:
        message = f"this record is damaged: {error!r}"
        hint = "end the daemons of that sandbox, then remove its folder"
        raise SandboxError(message, where=str(folder / NAME), hint=hint) from error


@contextmanager
def locked(folder: Path, create: bool = False) -> Iterator[bool]:
    """Lock the folder; yields False if there is none."""
    try:
        handle = _hold(folder, create)
    except OSError as error:
        message = f"cannot use this folder: {error.strerror}"
        raise SandboxError(message, where=str(folder), hint="choose another --folder") from error
    try:
        yield handle is not None
    finally:
        if handle is not None:
            os.close(handle)


def _hold(folder: Path, create: bool) -> int | None:
    while True:
        if create:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        elif not folder.exists():
            return None
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(handle, fcntl.LOCK_EX)
        # The process that had the lock may have removed the folder.
        if folder.exists() and os.path.samestat(os.fstat(handle), folder.stat()):
            return handle
        os.close(handle)


def live(folder: Path) -> bool:
    """Whether the sandbox of this folder runs, starts or stops now."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    state = load(folder)
    return state is not None and bool(state.alive())
