"""SECURITY.md names a test of each threat; and what no other test tries."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_runs import Command
from local_runs import toy as toy
from sites import CHECKOUT, Site

PAGE = (CHECKOUT / "SECURITY.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (?!threat |---)(.+) \| (.+) \| (.*) \|$", re.MULTILINE)
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def lost(text: str) -> Iterator[str]:
    """The threats of a page without a test, and the tests that are not there."""
    for threat, _, tests in ROW.findall(text):
        named = TEST.findall(tests)
        if not named or TEST.sub("", tests).strip():
            yield threat
        for path, name in named:
            if name not in functions(CHECKOUT / path):
                yield f"{path}::{name}"


def functions(module: Path) -> set[str]:
    """The tests of a module."""
    if not module.is_file():
        return set()
    return {
        node.name
        for node in ast.parse(module.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }


def test_each_threat_names_its_tests() -> None:
    assert len(ROW.findall(PAGE)) > 20
    assert [*lost(PAGE)] == []
    tables = [line for line in PAGE.splitlines() if line.startswith("|")]
    assert len(tables) == len(ROW.findall(PAGE)) + 2 * PAGE.count("| threat |")  # no row unread


@pytest.mark.parametrize(
    "tests", ["", "later", "`tests/test_security.py::test_none`", "`tests/none.py::test_x`"]
)
def test_a_threat_without_a_test_is_seen(tests: str) -> None:
    assert len([*lost(f"| a thief | a lock | {tests} |")]) == 1


# Values that a script or a record could take from the environment of a submission.
SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "geheim-1",
    "WANDB_API_KEY": "geheim-2",
    "HF_TOKEN": "geheim-3",
    "MY_PASSWORD": "geheim-4",
}


def leaks(folder: Path) -> list[str]:
    """The files below a folder with a secret in them."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return [str(path) for path in files if b"geheim-" in path.read_bytes()]


def test_the_environment_is_written_nowhere(toy: Site, command: Command) -> None:
    """Neither at a submission, nor by ranks that train, nor by one that fails."""
    toy.write("fails.py", "import os\nassert os.environ['HF_TOKEN']\nraise ValueError('no')\n")
    trained = command("submit", "--gpus", "1", **SECRETS)
    assert trained.code == 0, trained.text
    failed = command("submit", "--no-snapshot", "--", sys.executable, "fails.py", **SECRETS)
    assert failed.code == 1 and "ValueError: no" in failed.text
    toy.slurm()
    submitted = command("submit", "--cluster", "slurm", "--dry-run", **SECRETS)
    assert submitted.code == 0 and "#SBATCH" in submitted.out
    submitted = command("submit", "--cluster", "slurm", **SECRETS)
    assert submitted.code == 0, submitted.text
    told = [command("report", "last", "-o", "report.html", **SECRETS), trained, failed, submitted]
    assert not [done.text for done in told if "geheim-" in done.text]
    assert len([*toy.runs.iterdir()]) >= 3
    assert leaks(toy.folder) == []
    (toy.runs / "probe").write_text(SECRETS["HF_TOKEN"])
    assert len(leaks(toy.folder)) == 1
