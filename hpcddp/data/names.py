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
    """The name of an entry on the node's disk: the last part of its path, or its bucket."""
    return entry.rstrip("/").rpartition("/")[2] if entry.strip("/") else ""


def placed(entries: Sequence[str], folder: Path) -> list[str]:
    """Entries as the nodes find them: relative paths are from the folder of the submission. An
    entry that begins with a variable is filled in on the node."""
    return [
        entry
        if "://" in entry or entry.startswith("$") or not entry
        else str(folder / Path(entry).expanduser())
        for entry in entries
    ]


def refuse_password(url: str, where: str = "") -> None:
    """Refuse a URL with a secret: the run's folder, listings and lines will hold the URL. A name
    alone, as abfs and hdfs have it before the @, is no secret.

    Raises:
        UserError: there is a password or a signature in it.
    """
    plain = urls.without_password(url)
    shown = urls.without_signature(plain)
    if shown != url:
        secret = "password" if plain != url else "signature"
        raise UserError(
            f"{shown} has a {secret} in it, which would be written to files and lines",
            where=where,
            hint="take it out, and give it to the store's driver by its own file or environment: "
            "for fsspec ~/.config/fsspec/*.json or FSSPEC_* variables",
        )


def check(entries: Sequence[str], dataset: Mapping[str, Any], sources: Mapping[str, str]) -> None:
    """Check that each entry has a name of its own, that a dataset with $STAGE has staged data, and
    that no URL has a secret in it.

    Raises:
        UserError: one of these is wrong.
    """
    where, seen = sources.get("data.stage", "data.stage"), dict[str, str]()
    for entry in entries:
        refuse_password(entry, where)
        name = name_of(entry)
        if name.startswith(".") or not name or name.endswith(":"):
            raise UserError(
                f"{entry!r} in data.stage has no name to be staged under",
                where=where,
                hint="name a file, a folder, or a store such as s3://bucket/prefix",
            )
        if name in seen:
            raise UserError(
                f"{seen[name]} and {entry} in data.stage are both called {name}",
                where=where,
                hint="stage the folder above them, or rename one",
            )
        seen[name] = entry
    for key, value in dataset.items():
        where = sources.get(f"dataset.{key}", f"dataset.{key}")
        for text in filter(lambda each: isinstance(each, str), _each(value)):
            refuse_password(text, where)
            if not entries and STAGE.search(text):
                raise UserError(
                    f"dataset.{key} is {text!r}, but nothing is staged",
                    where=where,
                    hint='name what the nodes copy: [data] stage = ["/proj/pets"]',
                )


def _each(value: Any) -> Iterator[Any]:
    """A value, or the values in its lists and tables."""
    if isinstance(value, list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _each(part)
    else:
        yield value


def absent(entries: Sequence[str]) -> list[str]:
    """Paths that are not there on this machine; the nodes may see more."""
    local = [entry for entry in entries if "://" not in entry and not entry.startswith("$")]
    return [entry for entry in local if not Path(entry).exists()]


def unstaged(value: str, entries: Sequence[str]) -> str:
    """A value with each $STAGE/NAME replaced by the entry of that name."""
    by_name = {name_of(entry): entry.rstrip("/") for entry in entries}

    def source(match: re.Match[str]) -> str:
        return by_name.get(match[1], match[0])

    return re.sub(rf"{STAGE.pattern}/([^/]+)", source, value)
