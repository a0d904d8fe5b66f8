"""A run dir, by itself and in a job of Slurm."""

import signal
from collections.abc import Iterator

import pytest
from sites import Site, record_run

from hpcddp.rundir import RunDir


@pytest.fixture
def run(site: Site) -> RunDir:
    made = RunDir(site.runs / "toy-1")
    made.create()
    return record_run(made, backend="local")


@pytest.fixture(autouse=True)
def hearing() -> Iterator[None]:
    """`end` ignores TERM, and what this process ignores its children would."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def in_slurm(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    record_run(run, host_suffix="-ib0")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[07-08]")
