"""What a user is told of a plan that is right."""

import importlib.util
import sys

import pytest
from sites import Site, flags


def test_the_risk_of_a_log_of_ones_own_is_said(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("slurm.output", "logs/%j.out")
    assert any("--output is logs/%j.out" in note for note in site.plan(flags(asked)).notes)
    monkeypatch.setenv("SBATCH_OUTPUT", "here.log")
    assert any("SBATCH_OUTPUT is here.log" in note for note in site.plan(flags()).notes)
    assert site.plan(flags(asked, ("cluster", "local"))).notes == ()


@pytest.mark.parametrize(
    ("dataset", "retry", "hang", "least"),
    [
        ("s3://bucket/pets", 100, 120, "130"),
        ("s3://bucket/pets", 100, 130, ""),
        ("s3://bucket/pets", 100, 0, ""),  # no hang is looked for
        ("/data/pets", 100, 120, ""),  # no store
    ],
)
def test_a_store_that_is_given_up_too_late_is_said(
    site: Site, dataset: str, retry: float, hang: float, least: str
) -> None:
    values = (("data.retry_seconds", retry), ("train.hang_seconds", hang))
    layer = flags(*((name, float(value)) for name, value in values), ("dataset.root", dataset))
    notes = site.plan(layer).notes
    assert [f"set train.hang_seconds to {least} or more" in note for note in notes] == [
        True
    ] * bool(least)


def test_a_staged_path_that_is_not_here_is_said_as_the_nodes_will_see_it(site: Site) -> None:
    site.write("here/x", "")
    notes = site.plan(flags(("data.stage", ["here", "gone"]))).notes
    text = "does not exist on this machine, but must exist on the nodes"
    assert notes == (f"data.stage: {site.folder}/gone {text}",)


def test_a_tracker_that_is_not_installed_is_said(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = flags(("metrics.trackers", ["tensorboard", "mlflow"]))
    assert site.plan(layer).notes == ()
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda n: None if n == "mlflow" else find(n))
    (note,) = site.plan(layer).notes
    assert note.endswith(
        "install the extra `mlflow` of hpcddp: pip install '.[mlflow]' in its clone, "
        "or 'WHEEL[mlflow]' with the path of its wheel"
    )


def test_keys_of_a_task_have_no_effect_on_a_command(site: Site) -> None:
    layer = flags(("command", [sys.executable, "x.py"]), ("train.lr", 3e-4), ("train.trace", True))
    site.write("x.py", "")
    assert site.plan(layer, job=None).notes == (
        "train.lr has no effect on a command: set it in the script",
    )
