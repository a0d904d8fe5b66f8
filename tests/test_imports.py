"""Who may import what, judged by a hook in a process of its own."""

import importlib
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from import_hook import CALL, HEAVY, imported, roots
from sites import Site

import hpcddp
import hpcddp.worker

OLD = ("spawn", "fork", "agent", "store", "sentry")  # for scripts of old runs: to be run


def test_the_hook_sees_what_is_imported() -> None:
    """colorsys: coverage, where it runs, imports json before any test's code."""
    assert {"colorsys", "jinja2"} < roots(imported("import colorsys, jinja2"))


def test_help_is_light(site: Site) -> None:
    names = imported(CALL, "--help")
    assert not roots(names) & (HEAVY | {"jinja2"})
    assert {n for n in names if n.startswith("hpcddp.")} <= {"hpcddp.cli", "hpcddp.errors"}


@pytest.mark.parametrize(
    "arguments", [["render", "--nodes", "2", "--gpus", "4"], ["submit", "--dry-run"]]
)
def test_a_script_is_rendered_without_anything_heavy(site: Site, arguments: list[str]) -> None:
    names = imported(CALL, *arguments)
    assert "jinja2" in roots(names)
    assert not roots(names) & HEAVY


@pytest.mark.parametrize(
    "arguments",
    [["ls"], ["ls", "--json"], ["config"], ["ranks"], ["plan", "digits"], ["track", "--help"]],
)
def test_what_only_reads_needs_no_templates(site: Site, arguments: list[str]) -> None:
    assert not roots(imported(CALL, *arguments)) & (HEAVY | {"jinja2"})


def test_the_dashboard_is_light() -> None:
    assert not roots(imported("import hpcddp.dashboard.app")) & (HEAVY | {"jinja2"})


@pytest.mark.parametrize("room", ["attempt", "slurm", "."])
def test_what_a_node_runs_is_the_standard_library_alone(room: str) -> None:
    """What modules of these rooms import, taken together."""
    package = Path(hpcddp.__file__).parent
    folder = (package / room).relative_to(package)
    names = [
        ".".join(("hpcddp", *folder.parts, path.stem)) for path in (package / room).glob("*.py")
    ]
    doors = {f"hpcddp.{name}" for name in ("__main__", "lightning", *OLD)}
    found = imported(
        "; ".join(f"import {name.removesuffix('.__init__')}" for name in names if name not in doors)
    )
    assert roots(found) - set(sys.stdlib_module_names) <= {"hpcddp", "_", "org"}
    assert not {name for name in found if name.startswith("hpcddp.train")}


def test_what_each_rank_waits_for_is_the_standard_library_alone() -> None:
    modules = ("worker", "launch.command", "launch.spawn", "launch.fork", "attempt.rank_exit")
    found = imported("; ".join(f"import hpcddp.{name}" for name in modules))
    assert roots(found) - set(sys.stdlib_module_names) <= {"hpcddp", "_", "org"}


def test_who_tells_trackers_needs_no_framework() -> None:
    names = imported("import hpcddp.trackers.send, hpcddp.trackers.__main__")
    assert not roots(names) & (HEAVY | {"jinja2", "tensorboard", "mlflow", "wandb"})


def test_programs_import_what_they_always_did() -> None:
    names = ("attach", "Run", "Sampler", "init", "submit_result")
    assert all(callable(getattr(hpcddp, name)) for name in names)
    frameworks = ("lightning", "transformers")
    modules = ("data", "dask", "dask.dispatch", "dask.results", "dask.places")
    for name in (*frameworks, *modules):
        importlib.import_module(f"hpcddp.{name}")
    assert hpcddp.worker.Worker.__module__ == "hpcddp.worker"  # pickled by this name
    (entry,) = [e for e in entry_points(group="torch.backends") if e.value.startswith("hpcddp")]
    assert callable(entry.load())
