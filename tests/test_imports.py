"""Who may import what, judged by a hook in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Site

import hpcddp

OLD = ("spawn", "fork", "agent", "store")  # for scripts of old runs: to be run
HEAVY = {"torch", "numpy", "submitit", "rich", "sklearn"}

# Runs one command and tells what was asked for on the way, found or not.
HOOK = """
import sys
class Hook:
    def find_spec(self, name, path=None, target=None):
        print("import", name, file=sys.stderr)
sys.meta_path.insert(0, Hook())
sys.argv[:] = ["hpcddp", *sys.argv[1:]]
"""
CALL = "from hpcddp.cli import main; main()"


def imported(statement: str, *arguments: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", HOOK + statement, *arguments],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    return {line.removeprefix("import ") for line in lines if line.startswith("import ")}


def roots(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def test_the_hook_sees_what_is_imported() -> None:
    assert {"json", "jinja2"} < roots(imported("import json, jinja2"))


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


def test_who_tells_trackers_needs_no_framework() -> None:
    names = imported("import hpcddp.trackers.tell, hpcddp.trackers.__main__")
    assert not roots(names) & (HEAVY | {"jinja2", "tensorboard", "mlflow", "wandb"})
