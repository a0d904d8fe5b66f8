"""Which files are a command's code, and which are linked."""

from pathlib import Path

import pytest
from repositories import repository

from hpcddp.errors import UserError
from hpcddp.planning import code_files


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return repository(tmp_path)


def test_runs_inside_the_repository_are_no_part_of_it(root: Path) -> None:
    runs = root / "runs"
    for path in (runs / "a/work/code.py", runs / ".code/ab/abcd"):
        path.parent.mkdir(parents=True)
        path.write_text("VALUE = 1\n")
    code = code_files.find(root, runs)
    assert not [path for path in code.files if path.startswith("runs")]
    assert code.links["runs"] == str(runs)


def test_without_git_large_files_environments_and_hidden_ones_are_linked(tmp_path: Path) -> None:
    root = tmp_path / "plain"
    for name, size in (
        ("a.py", 3),
        ("x/big.bin", 1_000_001),
        (".cache/x", 3),
        (".token", 3),
        ("env/pyvenv.cfg", 3),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"0" * size)
    code = code_files.find(root, root / "runs")
    assert set(code.files) == {"a.py"}
    assert set(code.links) == {"x/big.bin", ".cache", ".token", "env"}


def test_a_folder_that_an_outer_repository_ignores_is_one_without_git(root: Path) -> None:
    (root / "data/deep/train.py").write_text("")
    code = code_files.find(root / "data/deep", root / "runs")
    assert code.root == root / "data/deep" and set(code.files) == {"big", "train.py"}


def test_what_git_does_not_say_is_not_taken_for_nothing(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin/git"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'fatal: detected dubious ownership' >&2\nexit 128\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    with pytest.raises(UserError, match="dubious ownership") as caught:
        code_files.find(root, tmp_path / "runs")
    assert "--no-snapshot" in caught.value.hint
    program.unlink()
    with pytest.raises(UserError, match="git is not installed"):
        code_files.find(root, tmp_path / "runs")
