"""Completion in the shell: names of runs, commands and options, and the values of options."""

import subprocess
from collections.abc import Callable

import pytest
from sites import COMMAND, Outcome, Site, record_run
from terminal import Terminal

from hpcddp.rundir import RunDir

Command = Callable[..., Outcome]

# What bash does at a TAB, without a terminal: it splits the line, and calls our function.
BASH = """
shopt -s progcomp
compopt() { printf 'compopt %s %s\\n' "$@"; }
eval "$(_HPCDDP_COMPLETE=bash_source "$1")"
COMP_LINE=$2 COMP_POINT=${#2} COMP_WORDS=("${@:3}") COMP_CWORD=$(($# - 3))
_hpcddp_completion "$1"
printf '%s\\n' "${COMPREPLY[@]}"
"""


def complete(command: Command, *words: str) -> list[str]:
    done = command(
        COMP_WORDS=" ".join(["hpcddp", *words]), COMP_CWORD=str(len(words)),
        _HPCDDP_COMPLETE="bash_complete",
    )  # fmt: skip
    return [line.partition(",")[2] for line in done.out.split()]


def test_commands_options_and_names(site: Site, command: Command) -> None:
    assert "complete -o nosort -F _hpcddp" in command(_HPCDDP_COMPLETE="bash_source").out
    names = ["sandbox", "shell", "stacks", "status", "stop", "strategies", "submit"]
    assert complete(command, "s") == names
    assert complete(command, "submit", "--par") == ["--partition", "--parsable"]
    assert complete(command, "sandbox", "d") == ["down"]
    assert complete(command, "submit", "") == ["charlm", "digits", "resnet", "toy"]
    assert complete(command, "status", "") == ["last"]
    run = RunDir(site.runs / "toy-1")
    run.create()
    record_run(run)
    assert complete(command, "status", "t") == ["toy-1"]


def test_options_that_a_command_refuses_are_not_completed(site: Site, command: Command) -> None:
    assert complete(command, "run", "--n") == ["--name"]
    assert complete(command, "resume", "--n") == ["--nodes"]


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["--strategy", "f"], ["fsdp"]),
        (["--strategy", "pp=2,"], ["pp=2,ddp", "pp=2,zero1", "pp=2,fsdp", "pp=2,hsdp", "pp=2,tp"]),
        (["--launcher", "s"], ["srun", "spawn"]),
        (["--cluster", ""], ["auto", "local", "mine", "slurm"]),
        (["--set", "train.w"], ["train.weight_decay=", "train.warmup_steps="]),
        (["--set", "mod"], ["model."]),
        (["--set", "train.precision=b"], ["train.precision=bf16"]),
        (["--set", "train.tf32="], ["train.tf32=true", "train.tf32=false"]),
        (["--set", "train.lr="], []),
        (["--set", "nothing="], []),
    ],
)
def test_values_of_options(
    site: Site, command: Command, words: list[str], values: list[str]
) -> None:
    site.profile("mine", "")
    assert complete(command, "submit", *words) == values


def test_keys_to_explain(site: Site, command: Command) -> None:
    assert complete(command, "config", "--explain", "gpus") == ["gpus", "gpus_per_node"]


def replies(site: Site, line: str, *words: str) -> list[str]:
    """What bash would put in place of the last word."""
    script = site.write("complete.sh", BASH)
    done = subprocess.run(
        ["bash", script, COMMAND, line, *words], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return done.stdout.split("\n")[:-1]


@pytest.mark.parametrize(
    ("line", "words", "values"),
    [
        ("hpcddp submit --strategy=fs", ["--strategy", "=", "fs"], ["fsdp"]),
        ("hpcddp submit --strategy=", ["--strategy", "="],
         ["single", "dp", "ddp", "zero1", "fsdp", "hsdp", "tp", "pp"]),
        ("hpcddp submit --strategy pp=2,f", ["--strategy", "pp", "=", "2,f"], ["2,fsdp"]),
        ("hpcddp submit --set train.we", ["--set", "train.we"],
         ["compopt -o nospace", "train.weight_decay="]),
        ("hpcddp submit --set=train.we", ["--set", "=", "train.we"],
         ["compopt -o nospace", "train.weight_decay="]),
        ("hpcddp submit --set train.precision=b", ["--set", "train.precision", "=", "b"], ["bf16"]),
        ("hpcddp submit --set=train.precision=b", ["--set", "=", "train.precision", "=", "b"],
         ["bf16"]),
        ("hpcddp submit --set train.tf32=", ["--set", "train.tf32", "="], ["true", "false"]),
        ("hpcddp submit --set dataset.root=s3://b/x to",
         ["--set", "dataset.root", "=", "s3", ":", "//b/x", "to"], ["toy"]),
        ("hpcddp submit --cluster ./pro", ["--cluster", "./pro"], ["compopt -o default", ""]),
    ],
)  # fmt: skip
def test_bash_completes_behind_an_equals_sign(
    site: Site, line: str, words: list[str], values: list[str]
) -> None:
    """Bash splits a word at `=` and `:`, and replaces the last piece."""
    assert replies(site, line, "hpcddp", "submit", *words) == values


def test_a_tab_in_a_real_bash(site: Site) -> None:
    (site.bin / "hpcddp").symlink_to(COMMAND)
    setup = b'PS1="ready "; eval "$(_HPCDDP_COMPLETE=bash_source hpcddp)"\r'
    with Terminal(columns=100, shell="exec bash --norc -i") as terminal:
        terminal.type(setup)
        terminal.until("ready ", holds=lambda text: text.rstrip().endswith("ready"))
        terminal.type(b"hpcddp submit --set=train.prec\t")
        terminal.until("--set=train.precision=")
        terminal.type(b"bf\t")
        terminal.until("--set=train.precision=bf16")
        terminal.type(b"--strategy=hs\t")
        terminal.until("--set=train.precision=bf16 --strategy=hsdp")
