import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sites import COMMAND, Outcome, Site

from hpcddp.cli import COMMANDS

Command = Callable[..., Outcome]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sumbit"], ["no such command 'sumbit'", "submit"]),
        (["submit", "--nodse", "2"], ["no such option", "--nodes"]),
        (["logs", "last", "--rank", "-1"], ["--rank"]),
        (["render", "a", "b"], ["unexpected extra argument"]),
        (["submit", "train.py"], ["unknown job", "use: hpcddp submit -- python train.py"]),
        (["submit", "python", "train.py"], ["unexpected extra", "write -- before a program"]),
        (["submit", "python", "train.py", "--lr", "1"], ["--lr", "write -- before a program"]),
        (["export", "last"], ["missing argument"]),
    ],
)
def test_usage(hpcddp: Command, arguments: list[str], words: list[str]) -> None:
    done = hpcddp(*arguments)
    assert (done.code, done.out) == (2, "")
    assert all(w in done.err for w in words)


def test_help_is_there_for_every_command(hpcddp: Command) -> None:
    done = hpcddp("--help")
    assert done.code == 0
    assert all(f"\n  {name} " in done.out for name in COMMANDS)
    for name in COMMANDS:
        own = hpcddp(name, "-h" if name == "ls" else "--help")
        assert own.code == 0 and f"hpcddp {name} " in own.out.splitlines()[0]


def test_the_version_is_one_line(hpcddp: Command) -> None:
    from hpcddp import __version__

    assert hpcddp("--version").out.split()[-1] == __version__


def test_python_finds_the_same_command_line(hpcddp: Command) -> None:
    module = [sys.executable, "-m", "hpcddp", "ranks", "--nodes", "2", "--gpus", "4"]
    done = subprocess.run(module, capture_output=True, text=True, check=True)
    assert done.stdout == hpcddp(*module[3:]).out != ""


def config(hpcddp: Command, *arguments: str) -> dict[str, Any]:
    done = hpcddp("config", "--cluster", "mine", *arguments, "--json")
    assert done.code == 0, done.err
    data = json.loads(done.out)
    assert data["schema_version"] == 1
    keys: dict[str, Any] = data["keys"]
    return keys


def test_each_source_beats_the_next(
    site: Site, hpcddp: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def now() -> tuple[str, str]:
        row = config(hpcddp).get("slurm.time", {"value": "", "source": ""})
        return str(row["value"]), Path(row["source"]).name

    site.profile("mine", "")
    assert now() == ("", "")
    site.profile("mine", "[slurm]\ntime = 1")
    assert now() == ("1", "mine.toml")
    site.job("toy", "[slurm]\ntime = 2")
    assert now() == ("2", "toy.toml")
    monkeypatch.setenv("SBATCH_TIMELIMIT", "3")
    assert now() == ("3", "SBATCH_TIMELIMIT")
    monkeypatch.setenv("HPCDDP_SLURM__TIME", "4")
    assert now() == ("4", "HPCDDP_SLURM__TIME")
    row = config(hpcddp, "--time", "5")["slurm.time"]
    assert row == {"value": "5", "source": "--time"}


def test_every_kind_of_key_can_be_set_and_defaults_are_named(site: Site, hpcddp: Command) -> None:
    site.profile("mine", "")
    settings = ["train.lr=1e-3", "slurm.qos=high", "model.width=8", "env.A=1", "seed=3"]
    keys = config(hpcddp, *(word for s in settings for word in ("--set", s)))
    for setting in settings:
        name, _, value = setting.partition("=")
        assert str(keys[name]["value"]) == str({"train.lr": 1e-3}.get(name, value))
        assert keys[name]["source"] == "--set"
    assert keys["train.schedule"] == {"value": "cosine", "source": "default"}
    assert keys["global_batch"]["source"] == str(site.folder / "jobs" / "toy.toml")


def test_config_for_people_has_a_line_for_each_key(site: Site, hpcddp: Command) -> None:
    done = hpcddp("config", "--cluster", "slurm", "--set", "model.text=a\nb")
    lines = done.out.splitlines()
    assert [line.split()[:3] for line in lines if line.startswith("model")] == [
        ["model.text", '"a\\nb"', "--set"]
    ]


def test_render_gives_the_script_and_says_where_its_folder_is(site: Site, hpcddp: Command) -> None:
    done = hpcddp("render", "--nodes", "2", "--gpus", "4")
    folder = Path(done.err.removeprefix("folder  ").strip())
    assert (folder / "job.sbatch").read_text() == done.out
    assert folder.parent == site.runs
    assert done.out.startswith("#!/bin/bash\n# Made by hpcddp ")


def test_render_takes_the_cluster_of_the_job_file(site: Site, hpcddp: Command) -> None:
    site.profile("three", "[slurm]\npartition = 'gpu'\n")
    site.job("toy", "global_batch = 96\nepochs = 1\ncluster = 'three'\n")
    assert "#SBATCH --partition=gpu\n" in hpcddp("render", "toy").out
    assert "#SBATCH --partition" not in hpcddp("render", "toy", "--cluster", "slurm").out


def test_a_cluster_is_one_file(site: Site, hpcddp: Command) -> None:
    site.profile("three", "nodes = 3\ngpus_per_node = 2\n[slurm]\npartition = 'gpu'\n")
    done = hpcddp("render", "--cluster", "three", "--nodes", "3", "--gpus", "2")
    assert done.code == 0 and "#SBATCH --partition=gpu\n" in done.out
    for arguments, words in ((["--nodes", "4"], ("4", "3")), (["--gpus", "4"], ("4", "2"))):
        refused = hpcddp("render", "--cluster", "three", *arguments)
        assert refused.code == 2
        assert "three.toml" in refused.err and all(w in refused.err for w in words)


def test_a_task_is_two_files_and_is_not_imported(site: Site, hpcddp: Command) -> None:
    site.job("mine", "epochs = 1\n", task="raise SystemExit('imported')\n")
    for arguments in (["render", "mine"], ["config", "mine"], ["submit", "mine", "--dry-run"]):
        done = hpcddp(*arguments)
        assert done.code == 0 and "imported" not in done.text


def test_a_script_through_a_pipe_is_all_that_sbatch_needs(site: Site, command: Command) -> None:
    done = command("render", "--cluster", "slurm")
    assert subprocess.run(["bash", "-n"], input=done.out.encode(), check=True).returncode == 0


def test_submit_says_where_the_run_is_and_what_comes_next(site: Site, hpcddp: Command) -> None:
    site.slurm()
    done = hpcddp("submit", "--nodes", "2", "--gpus", "4")
    assert done.code == 0
    (run,) = site.runs.iterdir()
    for line in (f"run     {run.name}", "job     42", f"folder  {run}", f"log     {run}/log",
                 f"next    hpcddp status {run.name}", f"hpcddp logs -f {run.name}"):  # fmt: skip
        assert line in done.out


def test_submit_for_programs(site: Site, hpcddp: Command) -> None:
    site.slurm()
    assert hpcddp("submit", "--parsable").out == "42\n"
    first = json.loads(hpcddp("submit", "--json").out.splitlines()[0])
    assert first["job_id"] == "42"
    assert Path(first["path"]) == site.runs / first["run"]


def test_a_dry_run_shows_script_map_and_verdict_and_leaves_nothing(
    site: Site, hpcddp: Command
) -> None:
    site.slurm()
    done = hpcddp("submit", "--nodes", "2", "--gpus", "2", "--dry-run")
    assert done.code == 0
    assert done.out.startswith("#!/bin/bash\n# Made by hpcddp ")
    assert "rank  node  host" in done.out
    assert "sbatch --test-only: accepted" in done.err
    site.slurm(sbatch="[ $1 = --version ] || { echo 'sbatch: error: no such qos' >&2; exit 1; }")
    refused = hpcddp("submit", "--dry-run")
    assert refused.code == 1 and "refused: no such qos" in refused.err
    assert not site.runs.exists()


def test_a_dry_run_shows_each_ranks_place_in_the_mesh(site: Site, hpcddp: Command) -> None:
    site.slurm()
    done = hpcddp("submit", "--gpus", "4", "--strategy", "pp=2,ddp", "--dry-run")
    assert "local rank    pp   ddp  data\n" in done.out
    assert done.out.endswith("   3     0  -              3     1     1     1\n")
    shown = hpcddp("submit", "--gpus", "4", "--strategy", "dp", "--dry-run")
    assert shown.out.endswith("local rank\n   0     0  -              0\n")


def test_config_tells_who_asked_for_a_strategy(site: Site, hpcddp: Command) -> None:
    done = hpcddp("config", "--gpus", "4", "--strategy", "fsdp=2,tp=2", "--json")
    keys = json.loads(done.out)["keys"]
    assert keys["strategy"] == {"value": "fsdp=2,tp=2", "source": "--strategy"}
    assert keys["pp.schedule"] == {"value": "1f1b", "source": "default"}


def test_a_refusal_shows_slurms_words_and_the_script(site: Site, hpcddp: Command) -> None:
    refuse = "[ $1 = --version ] || { echo 'sbatch: error: no such qos' >&2; exit 1; }"
    site.slurm(sbatch=refuse)
    done = hpcddp("submit")
    (run,) = site.runs.iterdir()
    assert done.code == 1
    assert "no such qos" in done.err and f"{run}/job.sbatch" in done.err
    state = json.loads(hpcddp("status", "--json").out)
    assert (state["state"], state["run"]) == ("REFUSED", run.name)


@pytest.mark.parametrize(
    ("program", "code", "state"), [("exit 0", 0, "COMPLETED"), ("exit 3", 1, "FAILED")]
)
def test_a_run_here_is_followed_to_its_outcome(
    site: Site, command: Command, program: str, code: int, state: str
) -> None:
    """Where there is no Slurm; what would be the ranks is one line of shell here."""
    launch = f"{{% block launch %}}( echo '0: hello'; {program} ) &\n{{% endblock %}}"
    site.write("mine.sh.j2", "{% extends 'local.sh.j2' %}" + launch)
    done = command("submit", "--template", "mine.sh.j2", "--json")
    first, *_, last = done.out.splitlines()
    assert done.code == code, done.err
    assert set(json.loads(first)) == {"schema_version", "run", "job_id", "path"}
    assert json.loads(last)["state"] == state
    assert "0: hello\n" in done.err
    assert "note: Slurm not found; running 1 rank on this machine\n" in done.err


@pytest.mark.parametrize("arguments", [["ranks", "--nodes", "9000"], ["ranks"], ["--help"]])
def test_a_reader_that_leaves_early_sees_no_traceback(site: Site, arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [COMMAND, *arguments], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_full_disk_is_no_traceback(site: Site) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [COMMAND, "ranks", "--nodes", "9000"],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and "No space left" in done.stderr
    assert "Traceback" not in done.stderr
