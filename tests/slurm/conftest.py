"""A real Slurm for the tests in this folder: one sandbox for all of them."""

import os
import subprocess
import tempfile
import time
from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import run_states

from hpcddp.errors import SandboxError
from hpcddp.sandbox import daemons
from hpcddp.sandbox.cluster import Sandbox, Settings
from hpcddp.sandbox.own_processes import tail

from .desk import Desk, Slurm, make_toy

HERE = Path(__file__).parent
OUTCOME = pytest.StashKey[str]()  # why the tests here were skipped
LOGS = pytest.StashKey[Path]()  # of the sandbox that is up


def clean_environ(sandbox: Sandbox) -> dict[str, str]:
    """This environment as if no job and no other cluster were around, plus the sandbox's."""
    foreign = ("SLURM", "SBATCH_", "SALLOC_", "SQUEUE_", "SACCT_", "SCANCEL_", "SINFO_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    kept["XDG_CONFIG_HOME"] = str(sandbox.folder.with_name("config"))  # nothing of the user's own
    return {**kept, **sandbox.environ()}


@pytest.fixture(scope="session")
def slurm(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    try:
        daemons.require(accounting=True)
    except SandboxError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"no Slurm in CI: {error}", pytrace=False)
        pytestconfig.stash[OUTCOME] = " ".join(str(error).split())
        pytest.skip(f"no Slurm: {error.what}")
    # Not below pytest's own folder: its long path leaves no room for the daemons' sockets.
    with tempfile.TemporaryDirectory(prefix="hpcddp-", dir="/tmp") as parent:
        tmp_path_factory.getbasetemp()  # before: later folders in /tmp are not shared
        # Its nodes see what tests mount, as on a machine with systemd.
        subprocess.run(["mount", "--make-rshared", "/"], check=True)
        sandbox = Sandbox(Path(parent, "slurm"))
        try:
            nodes = 2 if pytestconfig.getoption("--smoke") else 4
            sandbox.up(Settings(nodes, accounting=False, grace=10, kill_wait=10))  # slow machines
            pytestconfig.stash[LOGS] = sandbox.logs
            yield Slurm(sandbox, clean_environ(sandbox))
        finally:
            run_states.close_all()
            sandbox.down()


@pytest.fixture
def desk(slurm: Slurm, tmp_path: Path) -> Iterator[Desk]:
    make_toy(tmp_path)
    # What a test does to a node says nothing to the others.
    own = slurm.environ | {"XDG_CONFIG_HOME": str(tmp_path / ".config")}
    yield Desk(tmp_path, replace(slurm, environ=own))
    rows = slurm.run("squeue", "--noheader", "--format=%i", "--states=PD,R,CG,S").stdout.split()
    if rows:
        slurm.run("scancel", *rows)
    while slurm.run("squeue", "--noheader").stdout:
        time.sleep(0.1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slurm)
        for mark in item.iter_markers("smoke"):
            item.user_properties.append(("smoke", mark.args[0]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and (logs := item.config.stash.get(LOGS, None)):
        for path in sorted(logs.glob("slurm*.log")):
            report.sections.append((path.name, tail(path, 40)))
    return report


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if why := config.stash.get(OUTCOME, ""):
        terminalreporter.write_sep("!", f"SLURM TESTS SKIPPED: {why}", red=True, bold=True)
