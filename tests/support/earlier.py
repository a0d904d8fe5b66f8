"""An earlier run of a job, with what it measured in its metrics."""

import json
import os
import time
from dataclasses import asdict
from typing import Any

from sites import Site, record_run

from hpcddp import spec
from hpcddp.attempt import ledger
from hpcddp.rundir import RunDir, write_json


def earlier_run(
    site: Site, save: float, step: float = 1.0, *, start: float = 20.0, name: str = "toy",
    number: int = 1, backend: str = "slurm", run: str = "",
) -> RunDir:  # fmt: skip
    """A run that ended, with what it measured."""
    folder = RunDir(site.runs / (run or f"{name}-20260101-0000-{len(list(site.runs.glob('*')))}"))
    folder.attempt(number).path.mkdir(parents=True)
    asked = spec.to_dict(spec.KEYS.build({"name": name, "task": "toy.py", "global_batch": 96}))
    record_run(folder, (1, 1), 1, backend, spec=asked, workdir=str(site.folder), cluster="slurm")
    facts = ledger.new_attempt("5", 1, slurm=True)
    facts.number, facts.began, facts.ended, facts.cause = number, 1000.0, 2000.0, "stopped"
    write_json(folder.attempt(number).facts, asdict(facts))
    lines: list[dict[str, Any]] = [
        {"event": "train", "step": 1, "time": 1000.0 + start, "step_s": 50 * step, "loss": 1.0},
        {"event": "train", "step": 10, "step_s": step / 2, "loss": 1.0},
        {"event": "checkpoint", "step": 10, "seconds": save},
        {"event": "train", "step": 20, "step_s": step, "loss": 1.0},
        {"event": "checkpoint", "step": 20, "seconds": save / 2},
    ]
    folder.attempt(number).metrics.write_text("".join(json.dumps(x) + "\n" for x in lines))
    write_json(folder.submission, {"backend": backend, "job_id": "5", "submitted": time.time()})
    when = time.time() - 1000 + len(list(site.runs.glob("*")))  # each newer than the one before
    os.utime(folder.job, (when, when))
    return folder
