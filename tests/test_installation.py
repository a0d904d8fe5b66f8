"""The wheel in an empty environment, without the network: by pip, pipx and uv."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import wheelhouse
from packages import built, copied, tracked
from sites import FOREIGN
from toy import TOY

from hpcddp import __version__

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("installation"),
    pytest.mark.skipif(not tracked(), reason="no repository"),
]


class Desk(NamedTuple):
    """A new user's folder, the wheel that he has, and his environment variables."""

    home: Path
    wheel: Path
    environ: dict[str, str]

    def run(self, *words: str | Path, **more: str) -> str:
        """A command's output; it must end well."""
        done = subprocess.run(
            words, cwd=self.home, env=self.environ | more, capture_output=True, text=True,
            stdin=subprocess.DEVNULL, timeout=600, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def installers(self) -> Path:
        """The programs of an environment of their own, which has pipx and uv."""
        tools = self.home / "tools"
        self.run(sys.executable, "-m", "venv", tools)
        self.run(tools / "bin" / "pip", "install", "-q", "pipx", "uv")
        return tools / "bin"


def by_pip(desk: Desk) -> tuple[Path, Path]:
    env = desk.home / "env"
    desk.run(sys.executable, "-m", "venv", env)
    desk.run(env / "bin" / "pip", "install", "-q", desk.wheel)
    desk.run(env / "bin" / "pip", "check")
    return env / "bin" / "hpcddp", env


def by_pipx(desk: Desk) -> tuple[Path, Path]:
    desk.run(desk.installers() / "pipx", "install", desk.wheel)
    assert (desk.home / "man" / "man1" / "hpcddp.1").is_file()  # where man looks for it
    return desk.home / "bin" / "hpcddp", desk.home / "pipx" / "venvs" / "hpcddp"


def by_uv(desk: Desk) -> tuple[Path, Path]:
    desk.run(desk.installers() / "uv", "tool", "install", desk.wheel)
    return desk.home / "bin" / "hpcddp", desk.home / "uv" / "hpcddp"


@pytest.fixture(scope="module")
def shelf() -> Path:
    try:
        return wheelhouse.filled()
    except subprocess.CalledProcessError:
        pytest.skip("the wheels of what hpcddp needs cannot be had here")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    return built("wheel", copied(folder / "copy"), folder / "made")


@pytest.fixture
def desk(shelf: Path, wheel: Path, tmp_path: Path) -> Desk:
    home, linked = tmp_path / "home", tmp_path / "torch"
    home.mkdir()
    linked.mkdir()
    wheelhouse.link_torch(linked)
    environ = wheelhouse.offline(home, shelf, linked)
    assert not [name for name in environ if name.startswith(FOREIGN)]
    return Desk(home, wheel, environ)


@pytest.mark.parametrize("install", [by_pip, by_pipx, by_uv])
def test_it_works_in_an_empty_environment(
    desk: Desk, install: Callable[[Desk], tuple[Path, Path]]
) -> None:
    """It has its templates, jobs and pages there, and trains."""
    command, prefix = install(desk)
    assert desk.run(command, "--version").strip() == f"hpcddp, version {__version__}"
    assert "#SBATCH --nodes=2\n" in desk.run(command, "render", "charlm", "--nodes", "2",
                                             "--cluster", "slurm")  # fmt: skip
    for name in ("man/man1/hpcddp-submit.1", "bash-completion/completions/hpcddp",
                 "zsh/site-functions/_hpcddp", "fish/vendor_completions.d/hpcddp.fish",
                 f"modulefiles/hpcddp/{__version__}"):  # fmt: skip
        assert (prefix / "share" / name).is_file()
    jobs = desk.home / "jobs"
    jobs.mkdir()
    (jobs / "toy.toml").write_text("global_batch = 8\nmax_steps = 12\n")
    (jobs / "toy.py").write_text(TOY)
    trained = desk.run(command, "submit", "toy", "--gpus", "2", "--follow")
    assert "gloo on CPU, 2 ranks" in trained
    assert "held-out samples, seed 0)" in trained
    python = prefix / "bin" / "python"
    torch = desk.run(python, "-c", "import torch; print(torch.__version__)").partition("+")[0]
    assert f"\ntorch=={torch.strip()}\n" in wheelhouse.CONSTRAINTS.read_text()
