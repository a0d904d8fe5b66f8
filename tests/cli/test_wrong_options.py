"""Options that cannot do what was meant are refused before anything is read or started."""

from collections.abc import Callable

import pytest
from sites import Outcome, Site

Command = Callable[..., Outcome]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sumbit"], "hpcddp: no such command 'sumbit'\n  did you mean submit?"),
        (["submit", "--nodse", "2"],
         "hpcddp submit: no such option '--nodse'\n  did you mean --nodes?"),
        (["submit", "--"], "hpcddp submit: no command after --\n"),
        (["submit", "--set", "epochs"], "--set: expected KEY=VALUE, got 'epochs'"),
        (["export", "last"], "hpcddp export: missing argument 'FILE'\n  usage: hpcddp export "),
        (["config", "--explain", "train.lrr"],
         "--explain: unknown key 'train.lrr'\n  did you mean train.lr?"),
        (["config", "--explain", "gpus_per_nod"],
         "--explain: unknown key 'gpus_per_nod'\n  did you mean gpus_per_node?"),
        (["config", "--explain", "train.learning_rate"],
         "--explain: unknown key 'train.learning_rate'\n  did you mean train.lr?"),
        (["strategies", "--keep", "jobs"], "--keep: the folder jobs exists already\n"),
    ],
)  # fmt: skip
def test_a_wrong_word_is_named_with_its_remedy(
    site: Site, hpcddp: Command, arguments: list[str], message: str
) -> None:
    done = hpcddp(*arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {message}"), done.err


def test_export_refuses_an_unknown_suffix_before_it_reads_anything(
    site: Site, hpcddp: Command
) -> None:
    """There is not even a run."""
    for file, what in (("w.xyz", "unknown suffix '.xyz'"), ("w", "the name has no suffix")):
        done = hpcddp("export", "last", file)
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith(f"error: {file}: {what}\n  known suffixes: .pt, .pth,")
        assert ".safetensors" in done.err


@pytest.mark.parametrize(
    ("words", "where"),
    [(["--nodes", "2"], "--nodes"), (["-N", "2"], "--nodes"), (["--gpus", "1"], "--gpus"),
     (["-t", "5"], "--time"), (["--cluster", "slurm"], "--cluster"), (["--env", "A=1"], "--env")],
)  # fmt: skip
def test_run_refuses_what_needs_more_than_its_process(
    site: Site, hpcddp: Command, words: list[str], where: str
) -> None:
    done = hpcddp("run", *words)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {where}: `run` ")
    assert not site.runs.exists()


def test_run_refuses_a_job_with_a_command(site: Site, hpcddp: Command) -> None:
    site.job("script", 'command = ["bash", "-c", "true"]\n')
    done = hpcddp("run", "script")
    assert done.code == 2 and "`run` requires a task" in done.err
    assert not site.runs.exists()


def test_an_unknown_command_of_a_small_group_lists_those_there_are(
    hpcddp: Callable[..., Outcome],
) -> None:
    done = hpcddp("sandbox", "uo")
    assert done.code == 2 and "no such command 'uo'" in done.err
    assert "use one of up, down, status, env" in done.err
