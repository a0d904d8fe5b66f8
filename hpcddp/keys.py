"""Keys of TOML files, declared as the fields of plain dataclasses.

A field declared with `key` carries its type, default, limits and one-line description. The checks,
the errors, `--set`, `hpcddp config` and the reference of all keys use them. Job files (spec.py) and
cluster profiles (clusters.py) are both read this way; a node needs only the standard library.
"""

from __future__ import annotations

import contextlib
import dataclasses
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, Generic, TypeVar

from hpcddp.errors import JobFileError

T = TypeVar("T")

# A field's type -> its name in the reference, and what an error says of it.
TYPES = {
    "int": ("integer", "a whole number"),
    "float": ("number", "a number"),
    "bool": ("boolean", "true or false"),
    "str": ("string", "a string"),
    "list[str]": ("list of strings", "a list of strings"),
    "dict[str, Any]": ("table", "a table"),
}
MOST = 20  # names that a hint lists


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
        default: the value if none is given; {} makes it a free table.
        text: a description of one line, without a capital or a full stop.
        least: smallest allowed value.
        choices: allowed strings; each element of a list must be one of them.
        scalar: members of this free table enter a script: only strings, numbers and booleans.
        alone: a string stands for a list of this one string.
    """
    metadata = {"text": text, "least": least, "choices": tuple(choices),
                "scalar": scalar, "alone": alone}  # fmt: skip
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

    @property
    def type(self) -> str:
        """The type in words, such as `list of strings`."""
        return TYPES[self.kind][0]

    @property
    def limits(self) -> str:
        """The smallest allowed value in words; "" for none."""
        return "" if self.least is None else f"at least {self.least:g}"

    @property
    def default_text(self) -> str:
        """The default as TOML has it."""
        return toml_text(self.default)


def toml_text(value: Any) -> str:
    """A value in the words of TOML: true, 2030-01-01, ['a', 1]."""
    if isinstance(value, list):
        return f"[{', '.join(map(toml_text, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name} = {toml_text(v)}' for name, v in value.items())}}}"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, str | int | float) else str(value)


def nearest(word: str, known: Iterable[str], *, what: str = "key", many: str = "") -> str:
    """A hint that names the most similar name, or else lists all of them.

    Args:
        many: the hint in place of a long list.
    """
    names = sorted(known)
    close = [n for n in names if n.rsplit(".", 1)[-1] == word][:1]  # "lr" may mean "train.lr"
    import difflib  # after an error only

    table = word[: word.rfind(".") + 1]
    inside = [n for n in names if n.startswith(table)]
    names, table = (inside, table) if inside else (names, "")  # compare only what may be wrong
    rest = [n.removeprefix(table) for n in names]
    matches = difflib.get_close_matches(word.removeprefix(table), rest, n=1, cutoff=0.6)
    close = close or [names[rest.index(n)] for n in matches]
    if close:
        return f"did you mean {close[0]}?"
    if many and len(names) > MOST:
        return many
    plural = f"{what[:-1]}ies" if what.endswith("y") and what != "key" else f"{what}s"
    return f"known {plural}: {', '.join(names)}" if names else f"there is no {what} yet"


class Keys(Generic[T]):
    """The key table of a dataclass and its sections.

    Args:
        cls: the dataclass; a field that is neither a `key` nor in `sections` is not allowed.
        sections: the fields that are dataclasses themselves, by their dotted names.

    A key of type dict is a free table: `slurm.partition` is a member of the table `slurm`.
    """

    def __init__(self, cls: type[T], sections: Mapping[str, type] | None = None) -> None:
        self.cls = cls
        self.sections = dict(sections or {})
        self.rows: dict[str, Key] = dict(self._rows(cls))
        self.tables = {name for name, row in self.rows.items() if row.kind.startswith("dict")}

    def _rows(self, cls: Any, prefix: str = "") -> Iterator[tuple[str, Key]]:
        for f in dataclasses.fields(cls):
            if section := self.sections.get(prefix + f.name):
                yield from self._rows(section, f"{prefix}{f.name}.")
                continue
            default = f.default
            if f.default_factory is not dataclasses.MISSING:
                default = f.default_factory()
            assert isinstance(f.type, str)  # from __future__ import annotations
            yield prefix + f.name, Key(kind=f.type, default=default, **f.metadata)

    def resolve(self, name: str, where: str) -> str:
        """The name of an existing key; otherwise JobFileError with the nearest one."""
        table, _, rest = name.partition(".")
        if (name in self.rows and name not in self.tables) or (table in self.tables and rest):
            return name
        phrase = name.rpartition(".")[2].replace("_", " ")  # "learning_rate" means "train.lr"
        named = (
            n for n, row in self.rows.items() if " " in phrase and f" {phrase} " in f" {row.text} "
        )
        likely = next(named, "")
        tables = ", ".join([*(n for n in self.sections if "." not in n), *sorted(self.tables)])
        many = f"known tables: {tables}; `hpcddp config --explain` lists all keys"
        hint = f"did you mean {likely}?" if likely else nearest(name, self.rows, many=many)
        if name in self.tables or name in self.sections:
            hint = f"{name} is a table: set a key in it, such as {name}.KEY"
        raise JobFileError(f"unknown key {name!r}", where=where, hint=hint)

    def check(self, name: str, value: Any, where: str, *, text: bool = False) -> Any:
        """The value of a key in its declared type, or JobFileError with key, value and remedy.

        Args:
            name: full dotted name, as `resolve` gives it.
            text: the value is text (of an option or a variable) and is converted first.
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
            raise JobFileError(f"{name} is {toml_text(value)}, but must be {problem}", where=where)
        return value

    def build(self, values: Mapping[str, Any]) -> T:
        """The dataclass from checked values by full dotted name."""
        result = self.cls()
        for name, value in values.items():
            table, _, rest = name.partition(".")
            if rest and table in self.tables:
                getattr(result, table)[rest] = value
            else:
                *sections, own = name.split(".")
                setattr(reduce(getattr, sections, result), own, value)
        return result

    def flatten(self, data: Mapping[str, Any], table: str = "") -> dict[str, Any]:
        """A nested table, as TOML or `dataclasses.asdict` has it, by dotted name."""
        flat: dict[str, Any] = {}
        for own, value in data.items():
            name = table + own
            if isinstance(value, Mapping) and (name in self.sections or name in self.tables):
                flat |= self.flatten(value, f"{name}.")
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
    """What a value must be, if it is not; otherwise empty."""
    if row.kind == "list[str]":
        good = isinstance(value, list) and all(isinstance(v, str) for v in value)
    else:
        good = type(value).__name__ == row.kind
    if not good:
        return TYPES[row.kind][1]
    if row.least is not None and not value >= row.least:
        return row.limits
    words = value if isinstance(value, list) else [value]
    if row.choices and any(word not in row.choices for word in words):
        some = "some" if isinstance(value, list) else "one"
        return f"{some} of {', '.join(row.choices)}"
    return ""


def _convert(kind: str, value: str) -> Any:
    """Text as the declared type. What does not convert stays text, which the check refuses."""
    with contextlib.suppress(ValueError):
        if kind in ("int", "float"):
            return int(value) if kind == "int" else float(value)
    if kind == "bool":
        return {"true": True, "false": False}.get(value.lower(), value)
    return _words(value) if kind == "list[str]" else value


def _words(text: str) -> Any:
    """A list in TOML, or words as a shell splits them, without any expansion."""
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
    """Text for a free table: a TOML value if it is one. For a script it stays text: there 01:00:00
    is not a time of day, and 0x10 not a number."""
    import tomllib

    if table.scalar:
        return {"true": True, "false": False}.get(value, value)
    try:
        return tomllib.loads(f"value = {value}")["value"] if "\n" not in value else value
    except tomllib.TOMLDecodeError:
        return value


def _check_member(table: Key, name: str, value: Any, where: str) -> Any:
    """Options and variables are scalars; a task's own arguments may be any TOML but dates."""
    scalar = table.scalar
    if not (isinstance(value, str | int | float) if scalar else _plain(value)):
        must = "a string, number or boolean" if scalar else "without dates and times"
        what = f"{name} is {toml_text(value)}, but must be {must}"
        raise JobFileError(what, where=where, hint="" if scalar else "put dates in quotes")
    if scalar and (code := control_character(str(value))):
        what = f"{name} is {value!r}, which contains a control character ({code})"
        raise JobFileError(what, where=where, hint="it enters a shell script: write one plain line")
    return value


def control_character(text: str) -> str:
    """The first character that is not allowed in a script's line, as U+000A; empty for none."""
    for character in text:
        if unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp"):
            return f"U+{ord(character):04X}"
    return ""


def _plain(value: Any) -> bool:
    """Whether JSON can hold a TOML value: all but dates and times."""
    if isinstance(value, dict | list):
        return all(map(_plain, value.values() if isinstance(value, dict) else value))
    return isinstance(value, str | int | float)
