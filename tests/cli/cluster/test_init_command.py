import tomllib
from collections.abc import Callable

import pytest
import recorded
from sites import Outcome, Site
from terminal import Terminal

DDP = "import torch.distributed as dist\ndist.init_process_group('gloo')\n"
Command = Callable[..., Outcome]


@pytest.fixture
def project(site: Site) -> Site:
    """A project with one script, on a recorded cluster."""
    recorded.install(site, "plain")
    for path in (site.folder / "jobs").iterdir():
        path.unlink()
    site.write("train.py", DDP)
    return site


def test_two_commands_run_a_script_that_nobody_adapted(project: Site, hpcddp: Command) -> None:
    done = hpcddp("init", "--yes")
    assert done.code == 0, done.err
    assert "script    train.py (DDP)\n" in done.out
    assert f"profile   {project.config}/hpcddp/clusters/plain.toml\n" in done.out
    assert done.out.endswith("next      hpcddp submit train\n")
    job = project.folder / "jobs" / "train.toml"
    assert tomllib.loads(job.read_text()) == {
        "command": ["python", "train.py"],
        "nodes": "2",
        "gpus": 4,
    }
    assert job.read_text().startswith("#:schema ./job.schema.json\n")
    assert (job.parent / "job.schema.json").exists()
    (project.bin / "python").symlink_to("/usr/bin/env")
    shown = hpcddp("submit", "train", "--dry-run")
    assert shown.code == 0, shown.err
    for line in ("nodes=2", "gpus-per-node=a100:4", "partition=gpu", "account=vision"):
        assert f"#SBATCH --{line}\n" in shown.out


def test_a_second_init_changes_nothing(project: Site, hpcddp: Command) -> None:
    hpcddp("init", "--yes")
    job = project.folder / "jobs" / "train.toml"
    before = job.stat().st_mtime_ns, job.read_text()
    done = hpcddp("init", "--yes")
    assert done.code == 0 and "(unchanged)" in done.out and job.read_text() == before[1]


def test_a_job_file_that_differs_is_shown_and_kept(project: Site, hpcddp: Command) -> None:
    hpcddp("init", "--yes")
    job = project.folder / "jobs" / "train.toml"
    mine = job.read_text().replace("gpus = 4", "gpus = 2")
    job.write_text(mine)
    done = hpcddp("init", "--yes")
    assert done.code == 2 and job.read_text() == mine
    assert "-gpus = 2" in done.out and "+gpus = 4" in done.out
    assert "the file exists, and differs" in done.err and "--force" in done.err
    profile = project.config / "hpcddp" / "clusters" / "plain.toml"
    changed = profile.read_text().replace('account = "vision"', 'account = "speech"')
    profile.write_text(changed)
    done = hpcddp("init", "--yes", "--force")
    assert done.code == 0 and "gpus = 4" in job.read_text()
    assert profile.read_text() == changed  # --force is about the job file
    assert 'kept your slurm.account: "speech" (detected: "vision")' in done.err


def test_a_schema_of_another_tool_is_kept(project: Site, hpcddp: Command) -> None:
    mine = project.write("jobs/job.schema.json", '{"title": "of mine"}')
    done = hpcddp("init", "--yes")
    assert done.code == 2 and "the file is not of hpcddp" in done.err
    assert mine.read_text() == '{"title": "of mine"}' and not list(project.config.rglob("*.toml"))


def test_where_no_job_file_can_be_no_profile_is_written(project: Site, hpcddp: Command) -> None:
    (project.folder / "jobs").rmdir()
    project.write("jobs", "a file")
    done = hpcddp("init", "--yes")
    assert done.code == 2 and "/jobs: the folder cannot be created" in done.err
    assert not list(project.config.rglob("*.toml"))


def test_a_job_file_that_is_no_utf_8_differs(project: Site, hpcddp: Command) -> None:
    (project.folder / "jobs" / "train.toml").write_bytes(b"name = 'gr\xfc\xdfe'\n")
    done = hpcddp("init", "--yes")
    assert done.code == 2 and "the file exists, and differs" in done.err


def test_a_gpu_that_only_a_feature_names_is_used(site: Site, hpcddp: Command) -> None:
    recorded.install(site, "constraint-only")
    site.write("train.py", DDP)
    assert hpcddp("init", "--yes", "train.py").code == 0
    values = tomllib.loads((site.folder / "jobs" / "train.toml").read_text())
    assert values["gpus"] == 1 and "device" not in values


def test_sizes_and_script_can_be_given(project: Site, hpcddp: Command) -> None:
    project.write("other/fit.py", "import torch\n")
    assert hpcddp("init", "other/fit.py", "-N", "1-4", "--gpus", "8").code == 0
    values = tomllib.loads((project.folder / "jobs" / "fit.toml").read_text())
    assert values == {"command": ["python", "other/fit.py"], "nodes": "1-4", "gpus": 8}


@pytest.mark.parametrize(
    ("text", "values", "note"),
    [
        (
            "import horovod.torch as hvd\nhvd.init()\n",
            {"launcher": "horovod"},
            "Move from Horovod to DDP",
        ),
        ("import lightning as L\nL.Trainer()\n", {}, "Use Lightning"),
        ("import transformers\ntransformers.Trainer()\n", {}, "Use the transformers Trainer"),
        (f"{DDP}open('../far/x')\n", {"snapshot": False}, ""),
    ],
)
def test_what_a_script_needs_besides(
    project: Site, hpcddp: Command, text: str, values: dict[str, object], note: str
) -> None:
    project.write("../far/x", "")
    project.write("train.py", text)
    done = hpcddp("init", "--yes")
    assert done.code == 0 and note in done.err
    made = tomllib.loads((project.folder / "jobs" / "train.toml").read_text())
    assert {k: v for k, v in made.items() if k not in ("command", "nodes", "gpus")} == values


def test_a_task_module_gets_a_job_of_two_files(project: Site, hpcddp: Command) -> None:
    (project.folder / "train.py").unlink()
    project.write("mine.py", "def model(): ...\ndef dataset(split): ...\ndef loss(a, b): ...\n")
    assert hpcddp("init", "--yes").code == 0
    values = tomllib.loads((project.folder / "jobs" / "mine.toml").read_text())
    assert values["task"] == "../mine.py"


def test_a_shell_script_can_be_named(project: Site, hpcddp: Command) -> None:
    project.write("go.sh", "python train.py --lr 0.1\n")
    assert hpcddp("init", "go.sh", "--gpus", "a100:2").code == 0
    values = tomllib.loads((project.folder / "jobs" / "go.toml").read_text())
    assert values == {"command": ["bash", "go.sh"], "nodes": "2", "gpus": 2, "gpu_type": "a100"}


def test_the_batch_of_a_task_divides_over_its_ranks(project: Site, hpcddp: Command) -> None:
    task = "def model(): ...\ndef dataset(): ...\ndef loss(): ...\n"
    project.write("task.py", task)
    assert hpcddp("init", "task.py", "-N", "1-3", "--gpus", "4").code == 0
    values = tomllib.loads((project.folder / "jobs" / "task.toml").read_text())
    assert values["global_batch"] == 48  # for 4, 8 and 12 ranks; the default is 32


def test_without_slurm_the_job_file_is_written_all_the_same(site: Site, hpcddp: Command) -> None:
    site.write("train.py", DDP)
    done = hpcddp("init", "--yes")
    assert done.code == 0 and "Slurm not found" in done.err
    values = tomllib.loads((site.folder / "jobs" / "train.toml").read_text())
    assert (values["nodes"], values["gpus"]) == ("1", 1)
    assert not (site.config / "hpcddp").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing.py"], "script 'nothing.py' not found"),
        (["/etc/hostname"], "/etc/hostname is outside of this folder"),
        (["--nodes", "0"], "less than 1 node"),
        (["--gpus", "x"], "is not a number of GPUs per node"),
    ],
)
def test_a_mistake_leaves_nothing_behind(
    project: Site, hpcddp: Command, words: list[str], message: str
) -> None:
    done = hpcddp("init", *words)
    assert done.code == 2 and message in done.err
    assert list((project.folder / "jobs").iterdir()) == [] and not list(project.config.iterdir())


def test_a_folder_without_a_script_says_what_to_do(project: Site, hpcddp: Command) -> None:
    (project.folder / "train.py").unlink()
    done = hpcddp("init")
    assert done.code == 2 and "name it: `hpcddp init SCRIPT`" in done.err


def test_a_terminal_is_asked_three_questions(project: Site) -> None:
    project.write("main.py", DDP)
    with Terminal("init") as terminal:
        terminal.until("script [1]")
        terminal.type(b"2\r")
        terminal.until("nodes [2]")
        terminal.type(b"1\r")
        terminal.until("GPUs per node [4]")
        terminal.type(b"\r")
        assert terminal.left() == 0
    values = tomllib.loads((project.folder / "jobs" / "main.toml").read_text())
    assert (values["command"], values["nodes"], values["gpus"]) == (["python", "main.py"], "1", 4)
