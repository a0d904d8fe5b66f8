"""The README's own examples do what it says."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from sites import Outcome, Site

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


@pytest.mark.parametrize(
    ("begins", "saved"),
    [
        (" import torch\n import torch.distributed", "saved checkpoints/step-200"),
        (" import lightning", "saved checkpoints/step-200"),
        (" import torch\n from accelerate", "saved checkpoints/step-100"),
    ],
)
def test_the_loop_trains_as_it_was_and_with_the_lines_added(
    site: Site, command: Callable[..., Outcome], begins: str, saved: str
) -> None:
    lines = block("diff", begins).splitlines()
    for mark in "-+":
        text = "\n".join(line[1:] for line in lines if line[:1] in ("", " ", mark))
        site.write("train.py", text + "\n")
        done = command("submit", "--gpus", "2", "--", sys.executable, "train.py")
        assert done.code == 0, done.text
    assert saved in done.text


def test_the_program_runs_on_a_dask_cluster(site: Site, command: Callable[..., Outcome]) -> None:
    site.write("program.py", block("python", "import hpcddp.dask"))
    words = ("--launcher", "dask", "--", sys.executable, "-m", "hpcddp.dask", "program.py")
    done = command("submit", "--gpus", "2", *words)
    assert done.code == 0 and "0: [[0, 3], [1, 3]]" in done.text, done.text


def test_the_cluster_is_taken(site: Site, command: Callable[..., Outcome]) -> None:
    site.profile("NAME", block("toml", "description"))
    done = command("render", "toy", "--cluster", "NAME", "--nodes", "3", "--gpus", "4")
    assert done.code == 0, done.text
    assert "#SBATCH --gpus-per-node=a100:4" in done.out
    site.write("child.sh.j2", block("jinja", "{% extends"))
    done = command("render", "toy", "--cluster", "NAME", "--template", "child.sh.j2")
    assert "source /opt/site/profile.sh" in done.out
