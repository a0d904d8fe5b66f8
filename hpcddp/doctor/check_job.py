"""The job of a check-up: an ordinary run whose ranks check their nodes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from hpcddp.doctor import check_rank
from hpcddp.errors import HpcddpError
from hpcddp.planning.jobfile import Layer
from hpcddp.rundir import RunDir, read_json
from hpcddp.spec import JobSpec

NAME = "doctor"
PYTHON = "python"  # in a command, the Python of the job's own software
LIMIT = "0:10:00"  # time limit of the job
# Variables with an address that a job needs -> the port, where the address has none.
ADDRESSES = {"MLFLOW_TRACKING_URI": 443, "WANDB_BASE_URL": 443, "AWS_ENDPOINT_URL": 443,
             "AWS_ENDPOINT_URL_S3": 443, "HF_ENDPOINT": 443}  # fmt: skip

# A user's key of a service -> the variable with its address, and the usual one.
SERVICES = {
    "WANDB_API_KEY": ("WANDB_BASE_URL", "https://api.wandb.ai"),
    "HF_TOKEN": ("HF_ENDPOINT", "https://huggingface.co"),
}


def layer(flags: Layer, environ: Mapping[str, str]) -> Layer:
    """The values of the job: those of the options, and its own.

    Args:
        flags: of the command line.
    """
    words = [PYTHON, "-P", "-m", "hpcddp.doctor.check_rank", *targets(environ)]
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


def targets(environ: Mapping[str, str]) -> Iterator[str]:
    """The hosts that the user's trackers and stores need, as host:port."""
    usual_hosts = {name: url for key, (name, url) in SERVICES.items() if environ.get(key)}
    for name, usual in ADDRESSES.items():
        address = urlsplit(environ.get(name) or usual_hosts.get(name, ""))
        if address.scheme in ("http", "https") and address.hostname:
            port = address.port or (80 if address.scheme == "http" else usual)
            yield f"{address.hostname}:{port}"


def results(run: RunDir) -> dict[str, Any]:
    """What the ranks of a check-up found.

    Raises:
        HpcddpError: they have not written it.
    """
    data = read_json(check_rank.results(run))
    if data is None:
        hint = f"see why: `hpcddp why {run.name}` and `hpcddp logs {run.name}`"
        raise HpcddpError("its ranks have written no results", where=str(run.path), hint=hint)
    return data
