"""Plans and runs as they are before and after a submission, without one."""

import socket
from typing import Any

from sites import Site, record_run

from hpcddp.attempt import ledger
from hpcddp.attempt.ledger import Attempt
from hpcddp.planning.jobfile import Layer
from hpcddp.planning.plan import Plan
from hpcddp.rundir import RunDir, write_json


def planned(site: Site, cluster: str = "slurm", **given: Any) -> Plan:
    """A plan of two nodes."""
    flags = Layer()
    for name, value in ({"cluster": cluster, "nodes": "2", "gpus": 4} | given).items():
        flags.put(name, value, "--set")
    return site.plan(flags)


def run_of(site: Site, name: str = "toy-1", backend: str = "slurm") -> RunDir:
    """A run's folder, with its record alone."""
    run = RunDir(site.runs / name)
    run.create()
    return record_run(run, backend=backend)


def submitted(run: RunDir, job_id: str | None = "7", **given: Any) -> RunDir:
    """The same with the id that the backend gave."""
    write_json(run.submission, {"job_id": job_id, "submitted": 10.0} | given)
    return run


def begun(run: RunDir, job_id: str = "7", began: float = 20.0, **given: Any) -> RunDir:
    """The same with an attempt that has begun on this host."""
    facts = Attempt(0, job_id, socket.gethostname(), 1, "1", True, "n[1-2]", began)
    for name, value in given.items():
        setattr(facts, name, value)
    assert ledger.begin(run, facts, lambda earlier: False)
    return run


def queue(site: Site, *rows: str) -> None:
    """A squeue with these rows, which writes down that it was asked."""
    lines = "".join(f"echo '{row}'\n" for row in rows)
    site.program("squeue", f"echo asked >>{site.folder}/asked\n{lines}")
