"""The user's module: what is found in it, and what is told when something is not."""

import sys

import pytest

from hpcddp.errors import JobFileError
from hpcddp.spec import JobSpec
from hpcddp.train.rank import task_module

WHOLE = """
def model(width=3): return ("model", width)
def dataset(split, path=""): return (split, path)
def loss(output, target): return 0
"""


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)

    def load(text=WHOLE, name="a_task.py", **spec):
        (tmp_path / name).write_text(text)
        spec.setdefault("task", str(tmp_path / name))
        return task_module.load(JobSpec(**spec), str(tmp_path))

    yield load
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", "") and "a_task" in name:
            del sys.modules[name]


def test_the_jobs_options_reach_the_functions(load):
    found = load(model={"width": 9}, dataset={"path": "/data"})
    assert found.model() == ("model", 9)
    assert found.dataset("eval") == ("eval", "/data")
    assert not found.has("optimizer") and found.metrics is None


def test_module_and_object_are_found_from_the_folder_of_submission(load, tmp_path):
    text = "class Tasks:\n" + "".join(f"    {text}\n" for text in WHOLE.strip().splitlines())
    text = text.replace("def ", "@staticmethod\n    def ")
    assert load(text, "a_task_module.py", task="a_task_module:Tasks").model() == ("model", 3)


def test_a_neighbour_of_the_task_can_be_imported(load, tmp_path):
    (tmp_path / "a_task_neighbour.py").write_text("WIDTH = 4\n")
    assert load("from a_task_neighbour import WIDTH\n" + WHOLE).model() == ("model", 3)


@pytest.mark.parametrize("function", task_module.REQUIRED)
def test_a_missing_function_is_named_with_the_file_and_its_form(load, function):
    with pytest.raises(JobFileError) as error:
        load(WHOLE.replace(f"def {function}", "def other"))
    assert f"function {function} is missing" in str(error.value)
    assert "a_task.py" in str(error.value) and f"{function}(" in error.value.hint


@pytest.mark.parametrize("table", ["model", "dataset"])
def test_an_option_that_the_function_does_not_take_is_named(load, table):
    found = load(**{table: {"colour": "red"}})
    with pytest.raises(JobFileError, match="colour") as error:
        found.model() if table == "model" else found.dataset("train")
    assert f"[{table}]" in str(error.value)


def test_an_error_inside_of_a_function_is_not_taken_for_a_wrong_option(load):
    found = load(WHOLE.replace('return ("model", width)', "return len(3)"))
    with pytest.raises(TypeError, match="has no len"):
        found.model()


def test_loss_and_metrics_are_looked_at_before_the_training(load):
    with pytest.raises(JobFileError, match=r"loss\(\)"):
        load(WHOLE.replace("output, target", "output"))


def test_the_nodes_own_folders_are_filled_in(load, monkeypatch):
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    monkeypatch.setenv("SECRET", "s")
    found = load(dataset={"path": "$SCRATCH/a/${SCRATCH}$SECRET$SCRATCHY"})
    assert found.dataset("train")[1] == "/scratch/me/a//scratch/me$SECRET$SCRATCHY"


def test_a_folder_that_this_node_has_not_is_an_error(load, monkeypatch):
    monkeypatch.delenv("SLURM_TMPDIR", raising=False)
    with pytest.raises(JobFileError, match="SLURM_TMPDIR is not set"):
        load(dataset={"path": "$SLURM_TMPDIR/x"}).dataset("train")


@pytest.mark.parametrize("name", ["nowhere.py", "a_task_missing:Task", "json:Task"])
def test_a_task_that_is_not_there_is_named(load, name):
    with pytest.raises(JobFileError, match=name.split(":")[0]):
        load(task=name)


def test_a_module_that_the_task_misses_is_not_taken_for_the_task(load):
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        load("import not_installed_anywhere\n" + WHOLE, "a_task_b.py", task="a_task_b:x")


def test_a_file_with_the_name_of_a_loaded_module_does_not_replace_it(load):
    import json

    assert load(WHOLE, "json.py").model() == ("model", 3)
    assert sys.modules["json"] is json
