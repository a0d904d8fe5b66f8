"""The keys of [software] while layers of values are merged: which exclude each other, and paths."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from string import Template
from typing import Any

from hpcddp.errors import UserError
from hpcddp.spec import KEYS, SoftwareSpec

TABLE = "software."
IMAGE = "software.container.image"
# Only one of them gives the ranks their Python.
PYTHONS = ("software.conda", "software.venv", "software.uv", IMAGE)
# A container's image that is a file or a folder; any other one is a name that the runtime knows.
PATH = re.compile(r"(~|\.{0,2}/|\$).*|[^:]+\.(sif|sqsh|squashfs|sqfs|img)")


def replaced(values: Mapping[str, Any], where: Mapping[str, str], below: Iterable[str]) -> set[str]:
    """The keys of lower layers that a layer replaces: a job has one Python.

    Args:
        where: the source of each value.

    Raises:
        UserError: the layer itself sets two of them.
    """
    own = [name for name in PYTHONS if values.get(name)]
    if not own:
        return set()
    if len(own) > 1:
        raise UserError(
            f"{own[0]} and {own[1]} are both set, but the ranks have one Python",
            where=where[own[1]],
            hint="remove one of the two",
        )
    drop = {name for name in PYTHONS if name not in own}
    if IMAGE in drop:
        drop |= {name for name in below if name.startswith("software.container.")}
    return drop & set(below)


def placed(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The values, with the paths in [software] complete: `~` and variables of this shell are
    replaced, and relative paths begin at a folder.

    Raises:
        UserError: a variable is not set here.
    """
    return {name: _placed(name, value, folder) for name, value in values.items()}


def complete(software: SoftwareSpec, folder: Path) -> SoftwareSpec:
    """The table with whole paths; those that are not whole begin at a folder."""
    flat = placed(KEYS.flatten({"software": asdict(software)}), folder)
    return KEYS.build(flat).software


def _placed(name: str, value: Any, folder: Path) -> Any:
    if name == "software.container.binds":
        return [":".join([_path(name, bind.partition(":")[0], folder), *bind.split(":")[1:]])
                for bind in value]  # fmt: skip
    if not value or not is_path(name, value):
        return value
    return _path(name, value, folder)


def is_path(name: str, value: str) -> bool:
    """Whether the value of a key of [software] is a path, not a name."""
    if name == IMAGE:
        return bool(PATH.fullmatch(value)) and "://" not in value
    return name in ("software.venv", "software.uv") or (name == "software.conda" and "/" in value)


def _path(name: str, text: str, folder: Path) -> str:
    """A whole path."""
    try:
        whole = Template(str(Path(text).expanduser())).substitute(os.environ)
    except (KeyError, ValueError) as error:
        what = f"{text!r} names a variable that is not set here: {error}"
        hint = "set it before the submission, or write the path"
        raise UserError(what, where=name, hint=hint) from None
    return os.path.normpath(folder / whole)
