"""Blocks, facts and shell variables of the script templates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from markdown import code, sentence, table

from hpcddp.planning import template_facts


def blocks() -> Iterator[str]:
    """The blocks that a child template can fill."""
    return _rows("block", template_facts.BLOCKS)


def facts() -> Iterator[str]:
    """The names that a template can use."""
    return _rows("name", template_facts.FACTS)


def variables() -> Iterator[str]:
    """The read-only shell variables of a script."""
    return _rows("variable", template_facts.VARIABLES)


def _rows(kind: str, names: Mapping[str, str]) -> Iterator[str]:
    yield from table((kind, "meaning"), [(code(n), sentence(text)) for n, text in names.items()])
