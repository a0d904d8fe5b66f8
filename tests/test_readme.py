"""The README's own examples do what it says."""

import re
from collections.abc import Callable
from pathlib import Path

from conftest import Outcome, Site

README = Path(__file__).parent.parent / "README.md"


def block(language: str, begins: str) -> str:
    """The first code block of a language that begins with a text."""
    blocks = re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)
    return next(text for text in blocks if text.startswith(begins))


def test_the_task_of_two_files_trains(site: Site, command: Callable[..., Outcome]) -> None:
    site.job("mine", block("toml", "global_batch"), block("python", "import torch"))
    done = command("submit", "mine", "--gpus", "2", "--set", "max_steps=3")
    assert done.code == 0, done.text
    assert "held-out samples, seed 0)" in done.out


def test_the_cluster_is_taken(site: Site, command: Callable[..., Outcome]) -> None:
    site.profile("NAME", block("toml", "description"))
    done = command("render", "toy", "--cluster", "NAME", "--nodes", "3", "--gpus", "4")
    assert done.code == 0, done.text
    assert "#SBATCH --gpus-per-node=a100:4" in done.out
    site.write("child.sh.j2", block("jinja", "{% extends"))
    done = command("render", "toy", "--cluster", "NAME", "--template", "child.sh.j2")
    assert "source /opt/site/profile.sh" in done.out
