"""What of a run does not change while it runs, for a page that is passed on."""

from __future__ import annotations

import re
from typing import Any

from hpcddp import record
from hpcddp.rundir import RunDir, read_json
from hpcddp.spec import JobSpec, to_dict

SECRET = re.compile(r"^env\..*(KEY|TOKEN|SECRET|PASS|CREDENTIAL)", re.IGNORECASE)
HIDDEN = "(hidden)"


def static(run: RunDir) -> dict[str, Any]:
    """What of a run does not change while it runs: configuration, versions, script, submission.

    ``defaults`` names the keys of the configuration that nobody changed.
    """
    job = record.read(run)
    try:
        script = run.script.read_text(encoding="utf-8", errors="replace")
    except OSError:
        script = ""
    facts = {name: value for name, value in vars(job).items() if name != "spec"}
    config, versions = _flat(job.spec), read_json(run.versions) or {}
    plain = _flat(to_dict(JobSpec()))
    defaults = [name for name, value in config.items() if name in plain and plain[name] == value]
    for name in filter(SECRET.search, config):  # a page is passed on
        script = script.replace(str(config[name]) or HIDDEN, HIDDEN)
        config[name] = HIDDEN
    told = {"job": facts, "config": config, "versions": versions, "script": script}
    return told | {"defaults": defaults}


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A table of tables by dotted names."""
    flat: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
