"""Keys of job files and cluster profiles, from their declarations."""

from __future__ import annotations

from collections.abc import Iterator

from markdown import code, entry, sentence

from hpcddp import keys, spec
from hpcddp.cli import show
from hpcddp.planning import clusters, jobfile


def text() -> Iterator[str]:
    """Every key of a job file, by its table."""
    yield from _tables(spec.KEYS, "job-key", "key")


def cluster_text() -> Iterator[str]:
    """Every key of a cluster profile."""
    yield from _tables(clusters.KEYS, "cluster-key", "cluster-key")


def environment() -> Iterator[str]:
    """The variables of Slurm's that set keys."""
    for variable, name in jobfile.SBATCH_VARIABLES.items():
        yield f"- {code(variable)}: {code(name)}"


def _tables(table: keys.Keys[object], kind: str, prefix: str) -> Iterator[str]:
    """The keys in the order of their declaration: those of no table, of each table, free tables."""
    sections = {name: f"`[{name}]`: {_first_line(cls)}" for name, cls in table.sections.items()}
    for section, title in {"": "Top level", **sections, "*": "Free tables"}.items():
        rows = {n: row for n, row in table.rows.items() if _section(n, table) == section}
        if rows:
            yield from (f"## {title}", "")
        for name, row in rows.items():
            shown = f"[{name}]" if section == "*" else name
            yield from entry(kind, shown, f"{prefix}-{name}", _body(name, row, kind == "job-key"))


def _section(name: str, table: keys.Keys[object]) -> str:
    if name in table.tables:
        return "*"
    return name.rpartition(".")[0]


def _first_line(cls: type) -> str:
    line = (cls.__doc__ or "").strip().splitlines()[0].rstrip(".")
    return line[:1].lower() + line[1:]


def _body(name: str, row: keys.Key, of_job: bool) -> Iterator[str]:
    yield from (sentence(row.text), "")
    facts = [row.type]
    if name and not row.kind.startswith("dict"):
        facts.append(f"default {code(row.default_text)}")
    if row.limits:
        facts.append(row.limits)
    yield from ("{.facts}", "; ".join(facts))
    if row.choices:
        yield f"; one of {', '.join(map(code, row.choices))}"
    if of_job:
        yield from ("", "{.facts}", f"Set by {', '.join(map(code, show.setters(name)))}")
