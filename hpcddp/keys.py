"""Keys: what a TOML file may say, as the fields of plain dataclasses.

A field declared with `key` carries its type, default, limits and one-line description. From that
follow the checks, the error texts, `--set` and `hpcddp config`. Job files (spec.py) and cluster
profiles (clusters.py) are both read this way; a node needs nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import dataclasses
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from hpcddp.errors import JobFileError

T = TypeVar("T")

KIND_TEXT = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "list[str]": "a list of texts",
}


def key(
    default: Any,
    text: str,
    *,
    least: float | None = None,
    choices: Iterable[str] = (),
    scalar: bool = False,
    alone: bool = False,
) -> Any:
    """Declare a key.

    Args:
        default: its value where none is given; {} makes it a free table.
        text: one line for a person.
        least: smallest value allowed.
        choices: allowed words, of a list each one.
        scalar: members of this free table enter a script: text, numbers or truth values only.
        alone: a text stands for the list of this one text.
    """
    metadata = {
        "text": text,
        "least": least,
        "choices": tuple(choices),
        "scalar": scalar,
        "alone": alone,
    }
    if isinstance(default, dict | list):
        return dataclasses.field(default_factory=type(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Key:
    """One row of a key table: its type as written in the field, default, limits, description."""

    kind: str
    default: Any
    text: str
    least: float | None
    choices: tuple[str, ...]
    scalar: bool
    alone: bool


def nearest(word: str, known: Iterable[str], *, what: str = "key") -> str:
    """A hint that names what the user may have meant, or lists what there is."""
    names = sorted(known)
    close = [n for n in names if n.rsplit(".", 1)[-1] == word][:1]  # "lr" may mean "train.lr"
    import difflib  # after an error only

    table = word[: word.rfind(".") + 1]
    inside = [n for n in names if n.startswith(table)]
    names, table = (inside, table) if inside else (names, "")  # what is right is no likeness
    rest = [n.removeprefix(table) for n in names]
    matches = difflib.get_close_matches(word.removeprefix(table), rest, n=1, cutoff=0.6)
    close = close or [names[rest.index(n)] for n in matches]
    if close:
        return f"did you mean {close[0]}?"
    return f"known {what}s: {', '.join(names)}" if names else f"there is no {what} yet"


class Keys(Generic[T]):
    """The key table of a dataclass and its sections.

    Args:
        cls: the dataclass; a field that is neither a `key` nor in `sections` is not allowed.
        sections: the fields that are dataclasses themselves.

    A key of type dict is a free table: `slurm.partition` is a member of the table `slurm`.
    """

    def __init__(self, cls: type[T], sections: Mapping[str, type] | None = None) -> None:
        self.cls = cls
        self.sections = dict(sections or {})
        self.rows: dict[str, Key] = dict(self._rows(cls))
        self.tables = {name for name, row in self.rows.items() if row.kind.startswith("dict")}

    def _rows(self, cls: Any, prefix: str = "") -> Iterator[tuple[str, Key]]:
        for f in dataclasses.fields(cls):
            if not prefix and f.name in self.sections:
                yield from self._rows(self.sections[f.name], f"{f.name}.")
                continue
            default = f.default
            if f.default_factory is not dataclasses.MISSING:
                default = f.default_factory()
            assert isinstance(f.type, str)  # from __future__ import annotations
            yield prefix + f.name, Key(kind=f.type, default=default, **f.metadata)

    def resolve(self, name: str, where: str) -> str:
        """The name, if there is such a key; else JobFileError with the nearest one."""
        table, _, rest = name.partition(".")
        if (name in self.rows and name not in self.tables) or (table in self.tables and rest):
            return name
        phrase = name.rpartition(".")[2].replace("_", " ")  # "learning_rate" means "train.lr"
        named = (
            n for n, row in self.rows.items() if " " in phrase and f" {phrase} " in f" {row.text} "
        )
        likely = next(named, "")
        hint = f"did you mean {likely}?" if likely else nearest(name, self.rows)
        if name in self.tables or name in self.sections:
            hint = f"{name} is a table: set a key in it, such as {name}.KEY"
        raise JobFileError(f"unknown key {name!r}", where=where, hint=hint)

    def check(self, name: str, value: Any, where: str, *, text: bool = False) -> Any:
        """The value of a key in its declared type, or JobFileError with key, value and remedy.

        Args:
            name: full dotted name, as `resolve` gives it.
            text: the value came as text (a flag or the environment) and is converted first.
        """
        if name not in self.rows:
            table = self.rows[name.partition(".")[0]]
            value = _from_text(table, value) if text else value
            return _check_member(table, name, value, where)
        row = self.rows[name]
        if text:
            value = _convert(row.kind, value)
        elif row.alone and isinstance(value, str):
            value = [value]
        if row.kind == "float" and type(value) is int:
            value = float(value)
        problem = _problem(row, value)
        if problem:
            raise JobFileError(f"{name} is {value!r}, but must be {problem}", where=where)
        return value

    def build(self, values: Mapping[str, Any]) -> T:
        """The dataclass from checked values by full dotted name."""
        result = self.cls()
        for name, value in values.items():
            table, _, rest = name.partition(".")
            if not rest:
                setattr(result, name, value)
            elif table in self.sections:
                setattr(getattr(result, table), rest, value)
            else:
                getattr(result, table)[rest] = value
        return result

    def flatten(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """A nested table, as TOML or `dataclasses.asdict` has it, by dotted name."""
        flat: dict[str, Any] = {}
        for name, value in data.items():
            if isinstance(value, Mapping) and (name in self.sections or name in self.tables):
                flat.update({f"{name}.{rest}": v for rest, v in value.items()})
            else:
                flat[name] = value
        return flat

    def load(self, data: Mapping[str, Any], where: str) -> T:
        """The dataclass from a nested table, checked."""
        flat = self.flatten(data)
        return self.build(
            {self.resolve(n, where): self.check(n, v, where) for n, v in flat.items()}
        )


def _problem(row: Key, value: Any) -> str:
    """What a value must be and is not; empty if it is."""
    if row.kind == "list[str]":
        good = isinstance(value, list) and all(isinstance(v, str) for v in value)
    else:
        good = type(value).__name__ == row.kind
    if not good:
        return KIND_TEXT[row.kind]
    if row.least is not None and not value >= row.least:
        return f"at least {row.least:g}"
    words = value if isinstance(value, list) else [value]
    if row.choices and any(word not in row.choices for word in words):
        some = "some" if isinstance(value, list) else "one"
        return f"{some} of {', '.join(row.choices)}"
    return ""


def _convert(kind: str, value: str) -> Any:
    """Text to the declared type; what does not convert stays text, for the check to refuse."""
    try:
        if kind == "int":
            return int(value)
        if kind == "float":
            return float(value)
    except ValueError:
        return value
    if kind == "bool":
        return {"true": True, "false": False}.get(value.lower(), value)
    return _words(value) if kind == "list[str]" else value


def _words(text: str) -> Any:
    """A list as TOML has it, or words as a shell reads them, without expanding anything."""
    import shlex
    import tomllib

    with contextlib.suppress(tomllib.TOMLDecodeError):
        if text.startswith("[") and "\n" not in text:
            return tomllib.loads(f"value = {text}")["value"]
    try:
        return shlex.split(text)
    except ValueError:
        return text


def _from_text(table: Key, value: str) -> Any:
    """Text for a free table: an argument as TOML reads it, if it does; for a script the text
    itself, since 01:00:00 and 0x10 are no date and no number there."""
    import tomllib

    if table.scalar:
        return {"true": True, "false": False}.get(value, value)
    try:
        return tomllib.loads(f"value = {value}")["value"] if "\n" not in value else value
    except tomllib.TOMLDecodeError:
        return value


def _check_member(table: Key, name: str, value: Any, where: str) -> Any:
    """Options and variables are scalars; a task's own arguments are whatever TOML can say."""
    scalar = table.scalar
    if not (isinstance(value, str | int | float) if scalar else _plain(value)):
        must = "text, a number or a truth value" if scalar else "plain data; put dates in quotes"
        raise JobFileError(f"{name} is {value!r}, but must be {must}", where=where)
    if scalar and (code := control_character(str(value))):
        what = f"{name} is {value!r}, which holds a control character ({code})"
        raise JobFileError(what, where=where, hint="it enters a shell script: write one plain line")
    return value


def control_character(text: str) -> str:
    """The first character that no line of a script can hold, as U+000A; empty if there is none."""
    for character in text:
        if unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp"):
            return f"U+{ord(character):04X}"
    return ""


def _plain(value: Any) -> bool:
    """Whether JSON can hold a TOML value; of all of them only dates and times it cannot."""
    if isinstance(value, dict | list):
        return all(map(_plain, value.values() if isinstance(value, dict) else value))
    return isinstance(value, str | int | float)
