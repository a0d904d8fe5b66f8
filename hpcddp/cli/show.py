"""`hpcddp render` and `hpcddp config`: the script of a job, and its keys."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from hpcddp.cli import completion
from hpcddp.cli.options import (
    JOB,
    PAIRS,
    SHORTCUTS,
    JobCommand,
    ask,
    complete_jobs,
    job_options,
    json_option,
    plan_job,
    plan_run,
    runs_option,
    runs_root,
)
from hpcddp.cli.terminal import tables
from hpcddp.cli.terminal.sections import option

if TYPE_CHECKING:
    from hpcddp.keys import Key, Keys

SCHEMA_VERSION = 1
# Key -> its options, where their values are not those of the key.
OPTIONS = {
    "gpus": ("--gpus", "--procs"),
    "total_gpus": ("--total-gpus",),
    "gpu_type": ("--gpus TYPE:N",),
    "device": ("--procs",),
    "snapshot": ("--no-snapshot",),
    "command": ("-- COMMAND...",),
}


@click.command(cls=JobCommand)
@click.argument("job", required=False, shell_complete=complete_jobs)
@job_options
@runs_option
def render(job: str | None, runs: str | None, **given: Any) -> None:
    """Print the script of JOB for plain sbatch.

    It creates the run folder and prints its path to stderr.
    """
    from hpcddp.submit import prepare

    root = runs_root(runs, new=True)
    run = prepare.new_run(plan_run(job, given, root, auto=script_cluster()), root)
    click.echo(f"folder  {run.path}", err=True)
    click.echo(run.script.read_text(encoding="utf-8"), nl=False)


def script_cluster() -> str:
    """The cluster of a job that names none: that of this shell, or Slurm if there is no sbatch."""
    from hpcddp.planning.asked import resolve

    name, _ = resolve("auto", os.environ)
    return "slurm" if name == "local" else name


@click.command(cls=JobCommand)
@click.argument("job", required=False, shell_complete=complete_jobs)
@option(JOB, "--explain", "key", is_flag=False, flag_value="", metavar="[KEY]",
        shell_complete=completion.keys,
        help="Explain a key, or all keys, of jobs and cluster profiles.")  # fmt: skip
@job_options
@json_option
def config(job: str | None, key: str | None, as_json: bool, **given: Any) -> None:
    """Print the value of each key of JOB, and where the value comes from.

    --explain KEY prints the meaning, type, default and limits of a key instead; with JOB its value
    too.
    """
    from hpcddp.spec import KEYS, to_dict

    if key is not None:
        return explain(key, job, given, as_json)
    plan = plan_job(job, given)
    values = KEYS.flatten(to_dict(plan.spec))
    rows = [(n, v, plan.sources.get(n, "default")) for n, v in values.items()]
    if as_json:
        keys = {n: {"value": v, "source": source} for n, v, source in rows}
        click.echo(json.dumps({"schema_version": SCHEMA_VERSION, "keys": keys}))
        return None
    texts = [(n, json.dumps(v, ensure_ascii=False), source) for n, v, source in rows]
    for line in tables.table([("KEY", "VALUE", "SOURCE"), *texts]):
        click.echo(line)
    return None


class Explained(NamedTuple):
    """A key to explain.

    Args:
        of: "job" or "cluster".
        value: its value in a job and the source of that, if a job was named.
    """

    of: str
    name: str
    key: Key
    value: tuple[Any, str] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The key as plain data."""
        key = self.key
        facts: dict[str, Any] = {
            "of": self.of,
            "key": self.name,
            "text": key.text,
            "type": key.type,
        }
        facts |= {"default": key.default, "least": key.least, "choices": list(key.choices)}
        if self.value:
            facts |= {"value": self.value[0], "source": self.value[1]}
        return facts

    def limits(self) -> str:
        """Its limits in words."""
        some = f"one of {', '.join(self.key.choices)}" if self.key.choices else ""
        return "; ".join(filter(None, (self.key.limits, some)))


def explain(name: str, job: str | None, given: dict[str, Any], as_json: bool) -> None:
    """Print the meaning of a key, of all keys of a table, or of all keys."""
    rows = _explained(name, job, given)
    if as_json:
        keys = [row.to_dict() for row in rows]
        click.echo(json.dumps({"schema_version": SCHEMA_VERSION, "keys": keys}))
        return
    single = name and len({row.name for row in rows}) == 1
    lines = [line for row in rows for line in _entry(row)] if single else list(_sections(rows))
    click.echo("\n".join(lines).rstrip())


def _explained(name: str, job: str | None, given: dict[str, Any]) -> list[Explained]:
    """The keys of jobs and of cluster profiles that a word means; all of them for ""."""
    from hpcddp import spec
    from hpcddp.errors import UserError
    from hpcddp.keys import nearest
    from hpcddp.planning import clusters

    values = _values(job, given) if job else {}
    rows = [Explained("job", n, spec.KEYS.rows[n], values.get(n)) for n in _named(name, spec.KEYS)]
    rows += [Explained("cluster", n, clusters.KEYS.rows[n]) for n in _named(name, clusters.KEYS)]
    if rows:
        return rows
    hint = nearest(name, {*spec.KEYS.rows, *clusters.KEYS.rows})
    if "mean" not in hint:
        spec.KEYS.resolve(name, "--explain")  # raises, and also searches the descriptions
    raise UserError(f"unknown key {name!r}", where="--explain", hint=hint)


def _named(name: str, keys: Keys[Any]) -> list[str]:
    """The keys that a word means: itself, those of a section, or the free table of a member."""
    table = name.partition(".")[0]
    if name in keys.rows:
        return [name]
    if table in keys.tables:
        return [table]
    return [n for n in keys.rows if not name or (name == table and n.startswith(f"{name}."))]


def _values(job: str, given: dict[str, Any]) -> dict[str, tuple[Any, str]]:
    """The value of each key of a job, and its source."""
    from hpcddp.spec import KEYS, to_dict

    asked = ask(job, given)
    flat = KEYS.flatten(to_dict(asked.spec))
    values = {name: (value, asked.sources.get(name, "default")) for name, value in flat.items()}
    for table in KEYS.tables:
        of = {n.partition(".")[2]: v for n, (v, _) in values.items() if n.startswith(f"{table}.")}
        sources = {source for n, (_, source) in values.items() if n.startswith(f"{table}.")}
        values[table] = of, ", ".join(sorted(sources)) or "default"
    return values


def _entry(row: Explained) -> Iterator[str]:
    """A key with all facts, a line each."""
    from hpcddp.keys import toml_text

    yield f"{row.name}  (key of {'jobs' if row.of == 'job' else 'cluster profiles'})"
    yield from tables.wrapped(_sentence(row.key.text))
    facts = [
        ("type", row.key.type),
        ("default", row.key.default_text if row.key.type != "table" else ""),
        ("allowed", row.limits()),
        ("set by", ", ".join(_places(row))),
        ("value", f"{toml_text(row.value[0])} ({row.value[1]})" if row.value else ""),
    ]
    yield from tables.fields([(f"  {name}", text) for name, text in facts if text])
    yield ""


def _places(row: Explained) -> list[str]:
    return [*setters(row.name), "the job file"] if row.of == "job" else ["a cluster profile"]


def setters(name: str) -> list[str]:
    """The options and variables that set a key, or the members of a table."""
    from hpcddp.planning import jobfile
    from hpcddp.spec import KEYS

    free = KEYS.rows[name].kind.startswith("dict")
    own = OPTIONS.get(name) or [f"--{option}" for option, key in SHORTCUTS.items() if key == name]
    variable = jobfile.variable(name) + ("__KEY" if free else "")
    of_sbatch = [v for v, key in jobfile.SBATCH_VARIABLES.items() if key.startswith(f"{name}.")]
    return [*(own or [_pair(name, free)]), variable, *of_sbatch]


def _pair(name: str, free: bool) -> str:
    """The option that sets any key, as it is written."""
    prefixes = {prefix.rstrip("."): option for option, prefix in PAIRS.items() if prefix}
    if free:
        return f"--{prefixes[name]} KEY=VALUE" if name in prefixes else f"--set {name}.KEY=VALUE"
    return f"--set {name}=VALUE"


def _sections(rows: list[Explained]) -> Iterator[str]:
    """Tables of keys, one for each section."""
    from hpcddp import spec

    titles = {"job": "Keys of jobs", "cluster": "Keys of cluster profiles"}
    sections: dict[tuple[str, str], list[tuple[str, ...]]] = {}
    for row in rows:
        section = row.name.rpartition(".")[0]
        title = titles[row.of]
        if section:
            title += f", [{section}]: {_sentence(spec.KEYS.sections[section].__doc__ or '')}"
        text = "; ".join(filter(None, (row.key.text, row.limits())))
        default = row.key.default_text if row.key.type != "table" else ""
        lines = sections.setdefault((title, section), [("KEY", "TYPE", "DEFAULT", "MEANING")])
        lines.append((row.name, row.key.type, default, _sentence(text)))
    for (title, _), lines in sections.items():
        yield title
        yield from tables.table(lines, wrap=True)
        yield ""


def _sentence(text: str) -> str:
    """A text with a capital and a full stop."""
    line = text.strip().partition("\n")[0].rstrip(".")
    return f"{line[:1].upper()}{line[1:]}."
