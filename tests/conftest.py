"""What the tests of the plan half share: a user's own folder, and the command itself."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from sites import CHECKOUT, COMMAND, FOREIGN, Outcome, Site

from hpcddp import cli

# A loaded machine stands still at times.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a script that starts the tests with &
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the long tests too")
    text = "run only the tests marked smoke, long ones too, or those marked quick=True of them"
    parser.addoption("--smoke", choices=("all", "quick"), help=text)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The long ones belong to `scripts/test --full` and to the smoke set, and have more time."""
    for item in items:
        if item.get_closest_marker("full") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))
    if which := config.getoption("--smoke"):
        left_out = [item for item in items if not _in_smoke_set(item, which == "quick")]
    elif not config.getoption("--full"):
        left_out = [item for item in items if item.get_closest_marker("full")]
    elif "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=_long)  # first, or the last one runs alone
        left_out = [item for item in items if item.get_closest_marker("alone")]
    else:
        return
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


def _long(item: pytest.Item) -> float:
    """A sort key: the longest come first, those of less than 25 minutes stay in their order."""
    mark = item.get_closest_marker("timeout")
    seconds = float(mark.args[0]) if mark else 0.0
    return -seconds if seconds >= 1500 else 0.0


def _in_smoke_set(item: pytest.Item, quick: bool) -> bool:
    mark = item.get_closest_marker("smoke")
    return mark is not None and (not quick or bool(mark.kwargs.get("quick")))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A user's folder, as the current one, in an environment without anything else of his."""
    made = Site(tmp_path)
    for name in [n for n in os.environ if n.startswith(FOREIGN)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", str(made.bin))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(made.config))
    monkeypatch.chdir(made.folder)
    return made


@pytest.fixture
def hpcddp(
    site: Site, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    """The command line in this process, errors and exit codes included."""

    def run(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["hpcddp", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as left:
            cli.main()
        out, err = capfd.readouterr()
        return Outcome(int(left.value.code or 0), out, err)

    return run


@pytest.fixture
def command(site: Site) -> Callable[..., Outcome]:
    """The command line as a user starts it: a process of its own."""

    def run(*arguments: str, **environ: str) -> Outcome:
        done = subprocess.run(
            [COMMAND, *arguments],
            capture_output=True, encoding="utf-8", errors="surrogateescape", timeout=240,
            check=False, env={**os.environ, **environ}, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        return Outcome(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture(scope="session")
def built_horovod() -> str:
    """The folder of Horovod for this torch. The first time it is built, which takes minutes."""
    for tool in ("c++", "cmake"):
        if not shutil.which(tool):
            pytest.skip(f"no {tool} to build Horovod with")
    script = CHECKOUT / "scripts" / "horovod"
    return subprocess.run([script], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads that wait for each other cost more than they bring where tests share the cores."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[Any]:
    """A real S3 server for all tests of a process; who shuts its door opens it again."""
    import s3

    with s3.serving() as server:
        yield server
