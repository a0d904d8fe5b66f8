"""What the tests of the plan half share: a user's own folder, and the command itself."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from hpcddp import cli, record
from hpcddp.launch.launchers import LAUNCHERS
from hpcddp.planning import jobfile, plan
from hpcddp.planning.jobfile import Layer
from hpcddp.planning.plan import Plan
from hpcddp.record import JobRecord
from hpcddp.rundir import RunDir

# A loaded machine stands still at times.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a script that starts the tests with &
    signal.signal(signal.SIGINT, signal.default_int_handler)
COMMAND = Path(sys.executable).with_name("hpcddp")
TASK = 'raise RuntimeError("the command line imported the task")\n'
FOREIGN = (
    "HPCDDP_",
    "PYTHONUNBUFFERED",
    "SLURM_",
    "SBATCH_",
    "SQUEUE_",
    "SINFO_",
    "SCANCEL_",
    "NO_COLOR",
    "COLUMNS",
)
# Values that a shell, sbatch or jinja would like to make something of.
NASTY = [
    "a b", "it's", 'say "hi"', "$(touch x)", "`touch x`", "; touch x", "50%", "a/b", "größe 数",
    "\\", "!x", "*", "-n", "", "#SBATCH --x", "$HOME", "&& touch x", "{{ 7 }}", "~",
]  # fmt: skip
TOOLS = (
    "bash",
    "cat",
    "echo",
    "env",
    "grep",
    "head",
    "sleep",
    "timeout",
    "touch",
    "printf",
    "setsid",
)


def record_run(
    run: RunDir,
    nodes: tuple[int, int] = (1, 2),
    gpus: int = 4,
    backend: str = "slurm",
    **more: Any,
) -> RunDir:
    """Give a run its job.json."""
    facts: dict[str, Any] = {"spec": {}, "workdir": str(run.path.parent), "created": 5.0}
    facts |= {"nodes": list(nodes), "gpus_per_node": gpus, "backend": backend}
    if name := more.get("launcher"):
        facts["launch"] = dict(LAUNCHERS[name].facts)
    record.write(run, JobRecord(run.name, **facts | more))
    return run


@dataclass(frozen=True)
class Outcome:
    """What a command left: its exit code and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the long tests too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The long ones belong to `scripts/test --full` alone."""
    if not config.getoption("--full"):
        long = [item for item in items if item.get_closest_marker("full")]
        items[:] = [item for item in items if item not in long]
        config.hook.pytest_deselected(items=long)


class Site:
    """A user's folder with one small job, on a machine where only a test's own Slurm answers."""

    def __init__(self, path: Path) -> None:
        self.folder = path / "work"
        self.runs = self.folder / "runs"
        self.bin = path / "bin"
        self.config = path / "config"
        for folder in (self.folder / "jobs", self.bin, self.config):
            folder.mkdir(parents=True)
        for tool in TOOLS:
            (self.bin / tool).symlink_to(next(Path(p, tool) for p in ("/usr/bin", "/bin")))
        self.job("toy", "global_batch = 96\nepochs = 1\n")

    def job(self, name: str, text: str, task: str = TASK) -> Path:
        """A job file, with its task beside it."""
        path = self.folder / "jobs" / f"{name}.toml"
        path.write_text(text, encoding="utf-8")
        path.with_suffix(".py").write_text(task)
        return path

    def write(self, name: str, text: str) -> Path:
        """A file in the user's folder."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def profile(self, name: str, text: str) -> Path:
        """A cluster profile of the user's own."""
        path = self.config / "hpcddp" / "clusters" / f"{name}.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def program(self, name: str, text: str) -> None:
        """A small shell program on PATH."""
        path = self.bin / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)

    def slurm(self, **answers: str) -> None:
        """A Slurm that takes every job, and answers as told."""
        programs = {
            "sbatch": "case $1 in --version) exit 0;; --test-only) cat >/dev/null; "
            "echo 'sbatch: Job 9 to start' >&2; exit;; esac; echo 'Submitted batch job 42'",
            "srun": "exit 0",
            "squeue": "exit 0",
            "sinfo": "echo 'gpu*|32|gpu:4'",
            "scancel": 'echo "$*" >>cancelled',
        }
        for name, text in (programs | answers).items():
            self.program(name, text)

    def plan(
        self, layer: Layer | None = None, job: str | None = "toy", notes: Sequence[str] = ()
    ) -> Plan:
        """The checked plan of a job under one layer of flags; on Slurm if it says nothing."""
        flags = layer or Layer()
        if "cluster" not in flags.values:
            flags.put("cluster", "slurm", "--cluster")
        layers, found = jobfile.load(job, flags, os.environ, self.folder)
        return plan.make(layers, [*notes, *found], environ=os.environ, folder=self.folder)


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
    script = Path(__file__).parents[1] / "scripts" / "horovod"
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
