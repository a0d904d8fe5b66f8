"""The names of staged data: checked before anything is submitted (standard library only)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcddp import urls
from hpcddp.errors import UserError

STAGE = re.compile(r"\$(?:STAGE\b|\{STAGE\})")


def name_of(entry: str) -> str:
    """The name of an entry on the node's disk: the last part of its path, or the bucket."""
    return entry.rstrip("/").rpartition("/")[2] if entry.strip("/") else ""


def placed(entries: Sequence[str], folder: Path) -> list[str]:
    """Make relative paths absolute, starting from the folder of the submission.

    URLs and entries that begin with a variable stay as they are; the node expands the variable.
    """
    return [
        entry
        if "://" in entry or entry.startswith("$") or not entry
        else str(folder / Path(entry).expanduser())
        for entry in entries
    ]


def refuse_password(url: str, where: str = "") -> None:
    """Refuse a URL with a secret, because the run folder, listings and logs contain the URL.

    A user name alone, as abfs and hdfs have it before the @, is no secret.

    Raises:
        UserError: the URL contains a password or a signature.
    """
    plain = urls.without_password(url)
    shown = urls.without_signature(plain)
    if shown != url:
        secret = "password" if plain != url else "signature"
        raise UserError(
            f"{shown} contains a {secret}, which would be written to files and logs",
            where=where,
            hint="remove it from the URL, and put it into the configuration of the store's driver: "
            "for fsspec ~/.config/fsspec/*.json or FSSPEC_* variables",
        )


def check(entries: Sequence[str], dataset: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    """Check that entries have different names, that $STAGE is used only with staged data, and that
    no URL contains a secret.

    Raises:
        UserError: one of these does not hold.
    """
    where, seen = sources.get("data.stage", "data.stage"), dict[str, str]()
    for entry in entries:
        refuse_password(entry, where)
        name = name_of(entry)
        if name.startswith(".") or not name or name.endswith(":"):
            raise UserError(
                f"{entry!r} in data.stage does not end in a name",
                where=where,
                hint="name a file, a folder, or a store such as s3://bucket/prefix",
            )
        if name in seen:
            raise UserError(
                f"{seen[name]} and {entry} in data.stage have the same name {name!r}",
                where=where,
                hint="stage the folder above them, or rename one of them",
            )
        seen[name] = entry
    for key, value in dataset.items():
        where = sources.get(f"dataset.{key}", f"dataset.{key}")
        for text in filter(lambda each: isinstance(each, str), _each(value)):
            refuse_password(text, where)
            if not entries and STAGE.search(text):
                raise UserError(
                    f"dataset.{key} is {text!r}, but data.stage is empty",
                    where=where,
                    hint='list the data to copy to the nodes: [data] stage = ["/proj/pets"]',
                )


def _each(value: Any) -> Iterator[Any]:
    """The value itself, or all values in its lists and tables."""
    if isinstance(value, list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _each(part)
    else:
        yield value


def absent(entries: Sequence[str]) -> list[str]:
    """Paths that do not exist on this machine. They may exist on the nodes."""
    local = [entry for entry in entries if "://" not in entry and not entry.startswith("$")]
    return [entry for entry in local if not Path(entry).exists()]


def unstaged(value: str, entries: Sequence[str]) -> str:
    """Replace each $STAGE/NAME in a value by the entry of that name."""
    by_name = {name_of(entry): entry.rstrip("/") for entry in entries}

    def source(match: re.Match[str]) -> str:
        return by_name.get(match[1], match[0])

    return re.sub(rf"{STAGE.pattern}/([^/]+)", source, value)
