import shutil
from pathlib import Path
from typing import Any

import pytest
from sites import Site

from hpcddp.errors import JobFileError, UserError
from hpcddp.planning import jobfile, resources
from hpcddp.planning.jobfile import Layer


def test_without_a_name_the_only_job_is_taken(site: Site) -> None:
    assert jobfile.find(None, site.folder) == (site.folder / "jobs" / "toy.toml", [])


def test_of_several_jobs_one_must_be_named(site: Site) -> None:
    site.job("other", "epochs = 1")
    with pytest.raises(UserError, match=r"\./jobs has 2 jobs: other, toy") as caught:
        jobfile.find(None, site.folder)
    assert caught.value.hint.endswith("such as other")


def test_without_jobs_the_shipped_one_is_taken_and_that_is_said(tmp_path: Path) -> None:
    path, notes = jobfile.find(None, tmp_path)
    assert path == resources.folder("jobs") / "digits.toml"
    assert "digits" in notes[0]


def test_in_a_clone_of_hpcddp_the_shipped_one_is_taken(tmp_path: Path) -> None:
    shutil.copytree(resources.folder("jobs"), tmp_path / "jobs")
    assert jobfile.find(None, tmp_path)[0] == resources.folder("jobs") / "digits.toml"
    mine = tmp_path / "jobs/mine.toml"
    mine.write_text("epochs = 1")
    assert jobfile.find(None, tmp_path) == (mine, [])


def test_a_job_of_ones_own_hides_a_shipped_one(site: Site) -> None:
    assert jobfile.find("digits", site.folder)[0] == resources.folder("jobs") / "digits.toml"
    mine = site.job("digits", "epochs = 1")
    assert jobfile.find("digits", site.folder)[0] == mine


def test_an_unknown_job_names_the_nearest(site: Site) -> None:
    with pytest.raises(JobFileError, match="unknown job 'digit'") as caught:
        jobfile.find("digit", site.folder)
    assert caught.value.hint == "did you mean digits?"


def test_a_program_in_the_place_of_a_job_has_the_whole_command_as_a_hint(site: Site) -> None:
    line = ("submit", "--gpus", "2", "train.py")
    for words, hint in ((line, "use: hpcddp submit --gpus 2 -- python train.py"), ((), "write --")):
        with pytest.raises(JobFileError, match=r"unknown job 'train\.py'") as caught:
            jobfile.find("train.py", site.folder, words)
        assert caught.value.hint.startswith(hint)


@pytest.mark.parametrize("job", ["jobs/toy.toml", "./jobs/toy.toml", "toy", None])
def test_a_job_is_a_name_or_a_path(site: Site, job: str | None) -> None:
    layer = jobfile.file_layer(jobfile.find(job, site.folder)[0])
    assert layer.values["name"] == "toy"
    assert Path(layer.values["task"]).samefile(site.folder / "jobs" / "toy.py")


def test_a_job_is_a_task_itself() -> None:
    values = jobfile.file_layer("package.module:Task").values
    assert values == {"task": "package.module:Task", "name": "module"}


def test_a_task_named_in_the_file_lies_beside_it(site: Site) -> None:
    site.write("jobs/net.py", "")
    path = site.job("a", 'task = "net.py"')
    assert jobfile.file_layer(path).values["task"] == str(site.folder / "jobs" / "net.py")
    path.write_text('task = "package.module:Task"')
    assert jobfile.file_layer(path).values["task"] == "package.module:Task"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("epochs = x\n", "is not TOML.*line 1"),
        ("a = 1\na = 2\n", "is not TOML.*line 2"),
        ("epoch = 3", "unknown key 'epoch'"),
        ("train = 3", "unknown key 'train'"),
        ("epochs = '3'", "epochs is '3', but must be a whole number"),
        ("[train]\nschedule = 'linear'", "one of constant, cosine"),
        ("[train]\nlr = -1", "train.lr is -1.0, but must be at least 0"),
        ("task = 'gone.py'", "gone.py does not exist"),
        ("[dataset]\nday = 2030-01-01", "dataset.day"),
        ('[slurm]\npartition = "a\\nb"', "slurm.partition .* control character"),
        ("nodes = true", "nodes is true"),
    ],
)
def test_what_a_job_file_cannot_say(site: Site, text: str, what: str) -> None:
    path = site.job("bad", text)
    with pytest.raises(JobFileError, match=what) as caught:
        jobfile.file_layer(path)
    assert caught.value.where == str(path)


def test_a_task_that_does_not_exist_has_a_hint(site: Site) -> None:
    path = site.job("bad", "task = 'nowhere.py'")
    with pytest.raises(
        JobFileError, match=r"task is 'nowhere.py', but .* does not exist"
    ) as caught:
        jobfile.file_layer(path)
    assert "fix the path" in caught.value.hint and "package.module:object" in caught.value.hint


def test_an_unknown_variable_does_not_list_all_variables() -> None:
    with pytest.raises(UserError) as caught:
        jobfile.environment_layer({"HPCDDP_QQQQQQQQQQZZZ": "1"})
    assert (
        caught.value.hint.startswith("unset HPCDDP_QQQQQQQQQQZZZ, or")
        and len(caught.value.hint) < 120
    )


def test_a_file_that_is_no_text_is_no_toml(site: Site) -> None:
    path = site.folder / "jobs" / "toy.toml"
    path.write_bytes(b"name = '\xff'")
    with pytest.raises(JobFileError, match="is not TOML"):
        jobfile.read_toml(path)
    with pytest.raises(JobFileError, match="cannot read the file"):
        jobfile.read_toml(path.parent)


def test_a_job_without_a_task_says_where_one_goes(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("epochs = 1")
    with pytest.raises(JobFileError, match="has neither a task nor a command") as caught:
        jobfile.file_layer(path)
    assert "a.py" in caught.value.hint


def test_every_key_has_a_variable() -> None:
    environ = {
        "HPCDDP_NODES": "2-4",
        "HPCDDP_TRAIN__LR": "0.5",
        "HPCDDP_SLURM__CPUS_PER_TASK": "07",
        "HPCDDP_ENV__LEVEL": "0x10",
        "HPCDDP_MODEL__WIDTH": "8",
        "HPCDDP_RUNS": "/elsewhere",
        "PATH": "/bin",
    }
    assert jobfile.environment_layer(environ).values == {
        "nodes": "2-4",
        "train.lr": 0.5,
        "slurm.cpus-per-task": "07",
        "env.LEVEL": "0x10",
        "model.width": 8,
    }


@pytest.mark.parametrize(
    ("variable", "hint"),
    [("HPCDDP_TRAIN__LRR", "HPCDDP_TRAIN__LR?"), ("HPCDDP_NODE", "HPCDDP_NODES?")],
)
def test_an_unknown_variable_is_an_error(variable: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        jobfile.environment_layer({variable: "1"})
    assert caught.value.where == variable
    assert hint in caught.value.hint


def test_a_wrong_value_in_a_variable_names_it() -> None:
    with pytest.raises(JobFileError, match="gpus is 'two'") as caught:
        jobfile.environment_layer({"HPCDDP_GPUS": "two"})
    assert caught.value.where == "HPCDDP_GPUS"


def test_a_named_few_of_sbatch_variables_count() -> None:
    environ = {"SBATCH_PARTITION": "long", "SBATCH_TIMELIMIT": "01:00:00", "SBATCH_DEBUG": "1"}
    layer = jobfile.sbatch_layer(environ)
    assert layer.values == {"slurm.partition": "long", "slurm.time": "01:00:00"}


def layer(where: str, **values: Any) -> Layer:
    made = Layer()
    for name, value in values.items():
        made.put(name.replace("__", "."), value, where)
    return made


def test_the_first_layer_wins_and_is_named() -> None:
    spec, sources = jobfile.merge(
        [
            layer("--set", train__lr=0.5),
            layer("HPCDDP_SEED", seed=3),
            layer("toy.toml", seed=4, epochs=2, train__lr=0.1),
        ]
    )
    assert (spec.train.lr, spec.seed, spec.epochs, spec.global_batch) == (0.5, 3, 2, 32)
    assert sources == {"train.lr": "--set", "seed": "HPCDDP_SEED", "epochs": "toy.toml"}


def test_options_are_written_with_either_dash() -> None:
    assert layer("x", slurm__cpus_per_task=4).values == {"slurm.cpus-per-task": 4}
