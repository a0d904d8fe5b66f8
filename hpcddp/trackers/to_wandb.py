"""Weights & Biases: one run by its id, which is the run's name; online or offline.

Its steps only go on: a repeated step keeps the values that were sent first. When the run is opened,
the server says how far it is; offline the files say it. So no value is lost or doubled where the
process was killed in between.
"""

from __future__ import annotations

import netrc
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hpcddp import record
from hpcddp.errors import UserError
from hpcddp.rundir import RunDir
from hpcddp.trackers.send import config

# It looks at neither the machine nor the code, and tells its makers nothing of its failures.
SETTINGS = {
    "WANDB_SILENT": "true",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_CONSOLE": "off",
    "WANDB_INIT_TIMEOUT": "30",  # seconds in which the server must answer
}
OFF = ("disable_git", "disable_code", "x_disable_stats", "x_disable_meta")
HEADER, BLOCK, HEAD = 7, 1 << 15, 7  # bytes, of a file, of its blocks, of a piece of a record


def mode(environ: Mapping[str, str]) -> str:
    """WANDB_MODE; without it online where there is a key, else offline."""
    if given := environ.get("WANDB_MODE"):
        return given
    return "online" if environ.get("WANDB_API_KEY") or _in_netrc(environ) else "offline"


def _in_netrc(environ: Mapping[str, str]) -> bool:
    host = urlsplit(environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    path = environ.get("NETRC") or Path(environ.get("HOME") or "~", ".netrc").expanduser()
    try:
        return netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def knows(run: RunDir, memory: Mapping[str, Any]) -> bool:
    """Always: how far it is, is seen when it is open."""
    return True


def open_sink(run: RunDir, memory: Mapping[str, Any]) -> History:
    """Go on with the run, or begin it."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    import wandb

    how: Any = mode(os.environ)
    if how == "disabled":
        raise UserError("WANDB_MODE is disabled", where="tracker wandb", hint="take it off")
    own = {n: True for n in OFF if n in wandb.Settings.model_fields}
    settings = wandb.Settings(**own)
    opened = wandb.init(
        id=run.name,
        name=os.environ.get("WANDB_NAME") or run.name,
        project=os.environ.get("WANDB_PROJECT") or record.read(run).spec["name"],
        dir=os.environ.get("WANDB_DIR") or str(run.path),
        mode=how,
        resume="allow",
        settings=settings,
    )
    opened.config.update(config(run), allow_val_change=True)
    files = _offline(Path(opened.settings.wandb_dir), run.name, opened.settings.sync_file)
    sent = opened.step - 1 if how == "online" else memory.get("step", -1)
    return History(opened, max([-1, sent, *files]))


class History:
    """A run at W&B, or in files that `wandb sync` sends there."""

    def __init__(self, run: Any, sent: int) -> None:
        self.memory: dict[str, Any] = {}
        self._run, self._step = run, sent  # the newest step that it has

    def put(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """One line of its history; none for a step that it has."""
        if step > self._step:
            self._run.log({**values, "_timestamp": time}, step=step, commit=True)
            self._step = step

    def say(self, text: str) -> None:
        """The words as the run's notes."""
        self._run.notes = text

    def flush(self) -> bool:
        """False: a process of wandb's has the values; only the end shows that they are safe."""
        return False

    def close(self) -> None:
        """Wait until all is sent, or written."""
        self._run.finish()
        self.memory["step"] = self._step


def _offline(folder: Path, name: str, own: str) -> Iterator[int]:
    """The steps in a run's offline files, except the new file of this process."""
    from wandb.proto.wandb_internal_pb2 import Record

    for path in folder.glob(f"offline-run-*-{name}/run-{name}.wandb"):
        if str(path) == own:
            continue
        for data in records(path.read_bytes()):
            line = Record.FromString(data)
            if line.WhichOneof("record_type") == "history":
                yield line.history.step.num


def records(data: bytes) -> Iterator[bytes]:
    """The whole records of a .wandb file: pieces in blocks, as in LevelDB's log format."""
    whole, at = b"", HEADER
    while at + HEAD <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEAD:  # no room for a piece: zeros up to the next block
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        piece, at = data[at + HEAD : at + HEAD + size], at + HEAD + size
        if len(piece) < size or not kind:  # cut by a crash
            return
        whole = piece if kind in (1, 2) else whole + piece  # whole, first, middle, last
        if kind in (1, 4):
            yield whole
