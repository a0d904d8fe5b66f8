"""The job of a check-up: an ordinary run whose ranks check their nodes."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from hpcddp import record
from hpcddp.doctor import check_rank, service_hosts
from hpcddp.errors import HpcddpError
from hpcddp.planning.jobfile import Layer
from hpcddp.rundir import RunDir, read_json
from hpcddp.spec import KEYS, JobSpec, SoftwareSpec

NAME = "doctor"
PYTHON = "python"  # in a command, the Python of the job's own software
LIMIT = "0:10:00"  # time limit of the job


def layer(flags: Layer, environ: Mapping[str, str]) -> Layer:
    """The values of the job: those of the options, and its own.

    Args:
        flags: of the command line.
    """
    words = [PYTHON, "-P", "-m", "hpcddp.doctor.check_rank", *service_hosts.targets(environ)]
    own: dict[str, Any] = {"command": words, "name": NAME, "snapshot": False,
                           "requeue.enabled": False}  # fmt: skip
    if "slurm.time" not in flags.values:
        own["slurm.time"] = LIMIT
    for name, value in own.items():
        flags.put(name, value, "hpcddp doctor")
    return flags


def command(job: JobSpec) -> list[str]:
    """The command of the job: in the Python of its own software, or in this one."""
    first, *words = job.command
    own = job.software.own_python
    return [sys.executable if first == PYTHON and not own else first, *words]


def software(run: RunDir) -> SoftwareSpec:
    """The software of the job."""
    return KEYS.build(KEYS.flatten(record.read(run).spec)).software


def results(run: RunDir, versions: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What the ranks of a check-up found; as `here`, this machine beside the nodes of Slurm.

    Args:
        versions: of this machine, if it was checked; they count if the ranks use its Python.

    Raises:
        HpcddpError: they have not written it.
    """
    data = read_json(check_rank.results(run))
    if data is None:
        hint = f"see why: `hpcddp why {run.name}` and `hpcddp logs {run.name}`"
        raise HpcddpError("its ranks have written no results", where=str(run.path), hint=hint)
    if record.read(run).backend != "slurm":
        return data
    own = software(run).own_python
    return data | {"here": {"clock": _clock(run, data["time"]), **({} if own else versions or {})}}


def _clock(run: RunDir, moment: float) -> float:
    """Seconds by which this machine's clock is ahead of the first node's.

    Each clock is read beside a time of the file server: when the run was recorded here, and when
    the node wrote its results. Where files get the time of their writer, only the order counts: the
    results came after the record, and before now.

    Args:
        moment: of the results, by the node's clock.
    """
    created = record.read(run).created
    here, node = run.job.stat().st_mtime, check_rank.results(run).stat().st_mtime
    ahead = created - here - (moment - node)
    return min(max(ahead, created - moment), time.time() - moment)
