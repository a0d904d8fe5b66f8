"""JSON Schema of job files and cluster profiles, made from their keys, for editors.

The form is that of https://json-schema.org/draft/2020-12; taplo and Even Better TOML read it from a
line `#:schema PATH` at the top of a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpcddp.keys import Key, Keys

DIALECT = "https://json-schema.org/draft/2020-12/schema"
# A field's type -> that of JSON.
TYPES: dict[str, dict[str, Any]] = {
    "int": {"type": "integer"},
    "float": {"type": "number"},
    "bool": {"type": "boolean"},
    "str": {"type": "string"},
    "list[str]": {"type": "array", "items": {"type": "string"}},
    "dict[str, Any]": {"type": "object"},
}


def schema(
    keys: Keys[Any], title: str, also: Mapping[str, Sequence[str]] | None = None
) -> dict[str, Any]:
    """The schema of a file with these keys.

    Args:
        title: what the file is.
        also: the types that a key may have, where these are several.
    """
    top: dict[str, Any] = {}
    named = also or {}
    for name, row in keys.rows.items():
        *tables, own = name.split(".")
        place = top
        for table in tables:
            place = place.setdefault(table, _object({}))["properties"]
        place[own] = _property(row) | ({"type": list(types)} if (types := named.get(name)) else {})
    return {"$schema": DIALECT, "title": title, **_object(top)}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _property(row: Key) -> dict[str, Any]:
    """A key's type, text, default and limits."""
    made = {**TYPES[row.kind], "description": row.text, "default": row.default}
    if row.least is not None:
        made["minimum"] = row.least
    if row.choices and "items" in made:
        made["items"] = {**made["items"], "enum": list(row.choices)}
    elif row.choices:
        made["enum"] = list(row.choices)
    if row.scalar:
        made["additionalProperties"] = {"type": ["string", "number", "boolean"]}
    if row.alone:
        alone = {name: made.pop(name) for name in ("type", "items")}
        made["anyOf"] = [alone, {"type": "string"}]
    return made
