"""The facts of a run that do not change while it runs, for a page that others may read."""

from __future__ import annotations

import re
import shlex
from typing import Any

from hpcddp import record, urls
from hpcddp.rundir import RunDir, read_json
from hpcddp.spec import JobSpec, to_dict

HIDDEN = "(hidden)"
FIRST = ("python", "torch", "numpy", "hpcddp", "executable")
ENVIRONMENT = re.compile(r"^(readonly -a ENVIRONMENT=\()(.*)\)$", re.MULTILINE)  # see render.py


def static(run: RunDir) -> dict[str, Any]:
    """The facts that do not change while a run runs: configuration, versions, script, submission.

    Environment variables stand there by name, without their values, and URLs without users and
    signatures. ``defaults`` lists the keys of the configuration that have their default value.
    """
    job = record.read(run)
    try:
        script = run.script.read_text(encoding="utf-8", errors="replace")
    except OSError:
        script = ""
    submission = {name: value for name, value in vars(job).items() if name != "spec"}
    config, versions = _flat(job.spec), _versions(read_json(run.versions) or {})
    plain = _flat(to_dict(JobSpec()))
    defaults = [name for name, value in config.items() if name in plain and plain[name] == value]
    config |= {name: HIDDEN for name in config if name.startswith("env.")}
    script = ENVIRONMENT.sub(_names, script)
    facts = {"job": submission, "config": config, "versions": versions, "script": script}
    return {name: _redacted(value) for name, value in facts.items()} | {"defaults": defaults}


def _versions(recorded: dict[str, Any]) -> dict[str, Any]:
    """Python and packages in one table, the most important first."""
    packages = recorded.get("packages")
    flat = {name: value for name, value in recorded.items() if name != "packages"}
    flat |= packages if isinstance(packages, dict) else {}
    return {name: flat[name] for name in (*FIRST, *sorted(flat, key=str.lower)) if name in flat}


def _names(match: re.Match[str]) -> str:
    """The script's environment, without its values."""
    try:
        words = [word.partition("=")[0] for word in shlex.split(match[2])]
    except ValueError:  # edited by hand
        return f"{match[1]}{HIDDEN})"
    return f"{match[1]}{' '.join(f'{shlex.quote(name)}={HIDDEN}' for name in words)})"


def _redacted(value: Any) -> Any:
    """The same value, without secrets in URLs."""
    if isinstance(value, str):
        return urls.hidden(value, HIDDEN)
    if isinstance(value, dict):
        return {name: _redacted(each) for name, each in value.items()}
    return [_redacted(each) for each in value] if isinstance(value, list) else value


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A table of tables by dotted names."""
    flat: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
