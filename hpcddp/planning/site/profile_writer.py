"""Write a profile with a comment for each value, and keep what a person changed in it.

A value that is not the one that was written last belongs to a person: it stays, also where it was
removed. A file that a person made stays as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpcddp.errors import ClusterError
from hpcddp.planning.site.choices import Choice

if TYPE_CHECKING:
    from tomlkit import TOMLDocument

SCHEMA = "cluster.schema.json"  # beside the profile
HEAD = f"""\
#:schema ./{SCHEMA}
# Profile of the Slurm cluster {{cluster}}, from what Slurm says of it.
# Change what you like: a later `hpcddp cluster detect` keeps your changes.
# `hpcddp config --explain` explains the keys.
"""
# The first words of the lines that each detection writes anew.
MARKS = ("# sbatch --test-only ", "# unknown: ", "# on the nodes, by a check-up: ")


@dataclass(frozen=True)
class Change:
    """A value that a person changed, and the one that was detected now."""

    key: str
    kept: Any  # None: the person removed it
    detected: Any


@dataclass(frozen=True)
class Written:
    """A profile's text.

    Args:
        values: of these choices, those that are in the text, by dotted name.
        kept: what a person changed, or left out of an own file.
    """

    text: str
    values: dict[str, Any]
    kept: tuple[Change, ...]


def write(
    cluster: str,
    choices: Sequence[Choice],
    *,
    notes: Sequence[str] = (),
    present: str = "",
    earlier: Mapping[str, Any] | None = None,
    force: bool = False,
    unknown: Collection[str] = (),
    where: str = "",
) -> Written:
    """The text of a profile.

    Args:
        notes: lines for its head, each with a mark of MARKS; they replace the last ones.
        present: the text that is there; "" for none.
        earlier: the values that were written last; None or empty if a person made the file.
        force: replace what a person changed, and add what an own file lacks.
        unknown: keys that could not be detected this time: what was written last stays.
        where: the file, for errors.
    """
    if not present:
        return Written(_new(cluster, choices, notes), {row.key: row.value for row in choices}, ())
    document, mine = _parsed(present, where), dict(earlier or {})
    if not mine and not force:
        return Written(present, {}, _differences(document, choices))
    kept, values = [], {key: value for key, value in mine.items() if key in unknown}
    for choice in (row for row in choices if row.key not in values):
        own = _value(document, choice.key)
        if not force and _changed(choice.key, own, mine):
            if own != choice.value:
                kept.append(Change(choice.key, own, choice.value))
            if choice.key in mine:
                values[choice.key] = mine[choice.key]
            continue
        if own != choice.value:  # otherwise the line stays as it is
            _put(document, choice)
        values[choice.key] = choice.value
    _drop_gone(document, mine, {*unknown, *(choice.key for choice in choices)})
    return Written(_noted(document.as_string(), notes), values, tuple(kept))


def _differences(document: TOMLDocument, choices: Sequence[Choice]) -> tuple[Change, ...]:
    """What was detected and is not so in a file that a person made."""
    rows = ((row, _value(document, row.key)) for row in choices)
    return tuple(Change(row.key, own, row.value) for row, own in rows if own != row.value)


def _noted(text: str, notes: Sequence[str]) -> str:
    """A profile with these notes after the comments of its head, in place of the last ones."""
    lines = [line for line in text.splitlines(keepends=True) if not line.startswith(MARKS)]
    head = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return "".join([*lines[:head], *(f"{note}\n" for note in notes), *lines[head:]])


def _parsed(text: str, where: str) -> TOMLDocument:
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    try:
        return tomlkit.parse(text)
    except TOMLKitError as error:
        raise ClusterError(f"not TOML: {error}", where=where) from None


def _changed(key: str, own: Any, mine: Mapping[str, Any]) -> bool:
    """Whether a person set, changed or removed a value.

    Args:
        own: the value in the profile.
        mine: the values that were written last.
    """
    return bool(own != mine[key] if key in mine else own is not None)


def _new(cluster: str, choices: Sequence[Choice], notes: Sequence[str]) -> str:
    """The text of a new profile: a line for each value, those of tables last."""
    import tomlkit

    text, table = HEAD.format(cluster=cluster), ""
    text += "".join(f"{note}\n" for note in notes) + "\n"
    for choice in sorted(choices, key=lambda row: row.key.rpartition(".")[0]):
        own, _, name = choice.key.rpartition(".")
        text += f"\n[{own}]\n" if own != table else ""
        text += f"{name} = {tomlkit.item(choice.value).as_string()}"
        text += f"  # {choice.comment}\n" if choice.comment else "\n"
        table = own
    return text


def _table(document: TOMLDocument, key: str, *, make: bool = False) -> tuple[Any, str]:
    """The table that holds a key, and the key's name in it."""
    import tomlkit

    table, _, name = key.rpartition(".")
    if not table:
        return document, name
    if make and table not in document:
        document.add(tomlkit.nl())
        document.add(table, tomlkit.table())
    return document.get(table, {}), name


def _value(document: TOMLDocument, key: str) -> Any:
    """The plain value of a key; None without one."""
    table, name = _table(document, key)
    value = table.get(name)
    return value.unwrap() if hasattr(value, "unwrap") else value


def _put(document: TOMLDocument, choice: Choice) -> None:
    """Set a value with its comment; a table's values come after those of the file itself."""
    import tomlkit

    table, name = _table(document, choice.key, make=True)
    item = tomlkit.item(choice.value)
    if choice.comment:
        item.comment(choice.comment)
        item.trivia.comment_ws = "  "
    if name in table:
        table[name] = item
    else:
        table.append(name, item)


def _drop_gone(document: TOMLDocument, mine: Mapping[str, Any], stay: Collection[str]) -> None:
    """Remove what was detected then, and is not any more, unless a person changed it."""
    for key in mine.keys() - set(stay):
        if _value(document, key) == mine[key]:
            table, name = _table(document, key)
            table.remove(name)
