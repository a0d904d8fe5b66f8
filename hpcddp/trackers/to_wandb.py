"""Weights & Biases: one run by its id, which is the run's name; online or offline.

Steps of W&B only increase: a repeated step keeps the values that were sent first. When the run is
opened, the server reports the newest step; offline, the files show it. So no value is lost or
duplicated if a process is killed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hpcddp import record
from hpcddp.errors import UserError
from hpcddp.rundir import RunDir
from hpcddp.trackers.send import config
from hpcddp.urls import in_netrc

# W&B collects nothing about the machine and the code, and sends no reports of its own errors.
SETTINGS = {
    "WANDB_SILENT": "true",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_CONSOLE": "off",
    "WANDB_INIT_TIMEOUT": "30",  # seconds to wait for the server
}
OFF = ("disable_git", "disable_code", "x_disable_stats", "x_disable_meta")
HEADER, BLOCK, HEAD = 7, 1 << 15, 7  # bytes: file header, block, header of a piece


def mode(environ: Mapping[str, str]) -> str:
    """WANDB_MODE if it is set; otherwise online with an API key, offline without one."""
    if given := environ.get("WANDB_MODE"):
        return given
    host = urlsplit(environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    return "online" if environ.get("WANDB_API_KEY") or in_netrc(host, environ) else "offline"


def knows(run: RunDir, memory: Mapping[str, Any]) -> bool:
    """Always True: the newest step is read when the run is opened."""
    return True


def open_sink(run: RunDir, memory: Mapping[str, Any]) -> History:
    """Continue the run, or start it."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    import wandb

    how: Any = mode(os.environ)
    if how == "disabled":
        hint = "unset WANDB_MODE, or set it to online or offline"
        raise UserError("WANDB_MODE is disabled", where="tracker wandb", hint=hint)
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
    """A run at W&B, or in files that `wandb sync` uploads."""

    def __init__(self, run: Any, sent: int) -> None:
        self.memory: dict[str, Any] = {}
        self.place = run.url or f"{run.settings.sync_dir} (`wandb sync` uploads it)"
        self._run, self._step = run, sent  # the newest step that W&B has

    def put(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """Log a step, unless W&B has it."""
        if step > self._step:
            self._run.log({**values, "_timestamp": time}, step=step, commit=True)
            self._step = step

    def say(self, text: str) -> None:
        """Set the run's notes."""
        self._run.notes = text

    def flush(self) -> bool:
        """Return False: wandb's own process has the values; they are safe only after `close`."""
        return False

    def close(self) -> None:
        """Wait until everything is sent, or written to files."""
        self._run.finish()
        self.memory["step"] = self._step


def _offline(folder: Path, name: str, own: str) -> Iterator[int]:
    """The steps in a run's offline files, without this process's new file."""
    from wandb.proto.wandb_internal_pb2 import Record

    for path in folder.glob(f"offline-run-*-{name}/run-{name}.wandb"):
        if str(path) == own:
            continue
        for data in records(path.read_bytes()):
            line = Record.FromString(data)
            if line.WhichOneof("record_type") == "history":
                yield line.history.step.num


def records(data: bytes) -> Iterator[bytes]:
    """The complete records of a .wandb file: pieces in blocks, as in LevelDB's log format."""
    whole, at = b"", HEADER
    while at + HEAD <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEAD:  # too short for a piece: zeros up to the next block
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        piece, at = data[at + HEAD : at + HEAD + size], at + HEAD + size
        if len(piece) < size or not kind:  # incomplete after a crash
            return
        whole = piece if kind in (1, 2) else whole + piece  # 1 whole, 2 first, 3 middle, 4 last
        if kind in (1, 4):
            yield whole
