"""The first comment of a script: no secret, and no way out of it."""

import subprocess
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sites import NASTY, Outcome, Site

from hpcddp import __version__
from hpcddp.planning.script import header
from hpcddp.planning.script.header import Origin
from hpcddp.planning.script.hidden_values import hidden_words
from hpcddp.spec import JobSpec

Command = Callable[..., Outcome]
RANDOM = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b"


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--token", "abc", "--lr", "0.1"], ["--token", "...", "--lr", "0.1"]),
        (["--wandb-api-key=abc"], ["--wandb-api-key=..."]),
        (["--env", "HF_TOKEN=abc"], ["--env", "HF_TOKEN=..."]),
        (["--set", "env.DB_PASSWORD=a b"], ["--set", "env.DB_PASSWORD=... b"]),
        (["bash", "-c", "export API_KEY='abc'; run --secret abc -v"],
         ["bash", "-c", "export API_KEY='...'; run --secret ... -v"]),
        (["--headers", '{"Authorization": "Bearer abc.def"}'],
         ["--headers", '{"Authorization": "Bearer ..."}']),
        (["s3://ann:abc@host/data"], ["s3://...@host/data"]),
        ([RANDOM, f"--run={RANDOM}", "hf_abcdefghijklmnop"], ["...", "--run=...", "..."]),
        (["--auth", "--lr", "1"], ["--auth", "--lr", "1"]),
    ],
)  # fmt: skip
def test_values_that_look_like_secrets_are_left_out(words: list[str], shown: list[str]) -> None:
    assert list(hidden_words(words)) == shown


@pytest.mark.parametrize(
    "words",
    [
        ["submit", "digits", "--nodes", "2-4", "--gpus", "a100:4", "-t", "1-00:00:00"],
        ["python", "train.py", "--max-tokens", "2048", "--tokenizer", "gpt2", "--keys", "a,b"],
        ["--set", "train.lr=1e-3", "--data", "/scratch/imagenet/resnet50_2012_validation_set_224"],
        ["--monkey=3", "runs/digits-20261125-1331-ac86", "--sort-by", "author"],
    ],
)
def test_other_values_stay(words: list[str]) -> None:
    assert list(hidden_words(words)) == words


@given(st.text())
def test_a_comment_is_one_line_of_the_shell(text: str) -> None:
    line = header.comment(text)
    assert line.startswith("# ") and len(line.splitlines()) == 1


@pytest.mark.parametrize(
    "value", [*NASTY, "a\nrm -rf x", "a\r\n#SBATCH --wrap=x", "\u2028x", "\x85"]
)
def test_a_line_end_in_a_value_stays_in_the_comment(value: str) -> None:
    job = JobSpec(command=["python", value])
    lines = [
        header.comment(line) for line in header.lines(Origin(("submit", value), f"x{value}"), job)
    ]
    assert len(lines) == len("\n".join(lines).splitlines()) == 3
    script = "\n".join([*lines, "echo only"])
    done = subprocess.run(["bash"], input=script, capture_output=True, text=True, check=True)
    assert done.stdout == "only\n"


def test_a_script_says_how_it_was_made(site: Site, hpcddp: Command) -> None:
    site.slurm()
    site.write("train.py", "")
    python = str(site.bin / "python")
    site.program("python", "")
    words = ("render", "--nodes", "2", "--env", "WANDB_API_KEY=abc1", "--", python, "train.py")
    script = hpcddp(*words, "--password", "abc2").out
    top = script.partition("\n\n")[0].splitlines()
    assert top == [
        "#!/bin/bash",
        f"# Made by hpcddp {__version__}, by: hpcddp render --nodes 2 --env WANDB_API_KEY=..."
        f" -- {python} train.py --password ...",
        f"# Each rank runs: {python} train.py --password ...",
    ]
    assert "abc2" not in script
    of_a_file = hpcddp("render", "toy").out.splitlines()
    assert of_a_file[2:4] == [
        f"# Job file: {site.folder}/jobs/toy.toml",
        f"# Each rank runs the task {site.folder}/jobs/toy.py",
    ]
