"""Detects damaged checkpoints.

    of_sizes    COMPLETE is missing or incomplete, or a file has another size; quick
    of_content  a file has another SHA-256; reads all of it
    of_format   the files are as they were written, but are not a checkpoint

No training resumes from a damaged checkpoint or removes it. One that cannot be read is not damaged:
that is an OSError (disk_retry.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

from hpcddp.errors import CheckpointError
from hpcddp.rundir import step_of
from hpcddp.train.checkpoint.disk_retry import naming

FORMAT = 1
COMPLETE = "COMPLETE"
META = "meta.json"
CHUNK = 1 << 20  # bytes hashed at a time
# The required entries of meta.json, by type.
NUMBERS = ("step", "epoch", "samples_consumed")
OBJECTS = ("optimizer", "scheduler", "scaler")


def of_sizes(folder: Path) -> str:
    """The damage of a checkpoint by COMPLETE and the sizes of its files; "" for none.

    Raises:
        OSError: a file cannot be read, which is not damage.
    """
    try:
        files = _marked(folder)
    except (FileNotFoundError, NotADirectoryError):
        return f"{COMPLETE} is missing"
    if not files:
        return f"{COMPLETE} is damaged"
    for name, entry in files.items():
        try:
            size = (folder / name).stat().st_size
        except FileNotFoundError:
            return f"{name} is missing"
        if size != entry.get("size"):
            return f"{name} has {size} of {entry.get('size')} bytes"
    return ""


def of_content(folder: Path, share: int = 0, shares: int = 1) -> str:
    """The first file whose content has changed, or "".

    Args:
        share, shares: check only every ``shares``-th file; ranks divide the reading.

    Raises:
        OSError: a file cannot be read, which is not damage.
    """
    try:
        for name, entry in sorted(_marked(folder).items())[share::shares]:
            if digest(folder / name)["sha256"] != entry.get("sha256"):
                return f"{name} has changed since it was written"
    except FileNotFoundError as error:
        return _missing(error)
    return ""


def of_format(folder: Path) -> str:
    """The damage inside of files with the right sizes and checksums, or "".

    None of their content is run. A checkpoint of another format is not damaged: ``read_meta``
    reports the format.

    Raises:
        OSError: a file cannot be read, which is not damage.
    """
    from hpcddp.train.checkpoint import dcp_files

    try:
        facts = meta(folder)
        if type(facts.get("format")) is int and facts["format"] != FORMAT:
            return ""
        if not _is_sound(facts) or facts["step"] != step_of(folder):
            return f"{META} has missing or wrong entries"
        if not facts.get("files"):  # else a framework reads its own
            dcp_files.read_metadata(folder)
    except FileNotFoundError as error:
        return _missing(error)
    except CheckpointError as error:
        return error.what
    return ""


def digest(path: Path) -> dict[str, Any]:
    """A file's size in bytes and its SHA-256, as in COMPLETE."""
    digest, size = hashlib.sha256(), 0
    with naming(path), path.open("rb") as f:
        while chunk := f.read(CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return {"size": size, "sha256": digest.hexdigest()}


def meta(folder: Path) -> dict[str, Any]:
    """The content of meta.json; empty if it is not a JSON object."""
    with contextlib.suppress(ValueError, RecursionError):
        facts = json.loads(_text(folder / META))
        return facts if isinstance(facts, dict) else {}
    return {}


def _marked(folder: Path) -> dict[str, dict[str, Any]]:
    """The files listed in COMPLETE, with size and sha256; none if it is incomplete.

    Raises:
        OSError: COMPLETE is missing or cannot be read.
    """
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
        files: dict[str, dict[str, Any]] = json.loads(_text(folder / COMPLETE))["files"]
        if all(_is_entry(name, entry) for name, entry in files.items()):
            return files
    return {}


def _is_entry(name: str, entry: object) -> bool:
    path = Path(name)  # frameworks have folders in theirs
    inside = path.name and not path.is_absolute() and ".." not in path.parts
    return bool(inside) and str(path) == name and "\0" not in name and isinstance(entry, dict)


def _is_sound(meta: dict[str, Any]) -> bool:
    optimizer = meta.get("optimizer")
    return (
        meta.get("format") == FORMAT
        and all(type(meta.get(name)) is int and meta[name] >= 0 for name in NUMBERS)
        and all(isinstance(meta.get(name), dict) for name in OBJECTS)
        and isinstance(meta.get("best", {}), dict)
        and isinstance(optimizer, dict)
        and isinstance(optimizer.get("state"), dict)
        and isinstance(optimizer.get("param_groups"), list)
    )


def _missing(error: FileNotFoundError) -> str:
    return f"{Path(error.filename).name} is missing"


def _text(path: Path) -> str:
    with naming(path):
        return path.read_text(encoding="utf-8")
