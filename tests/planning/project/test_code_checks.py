"""What may be copied of a command's code, and what the command reads elsewhere."""

from pathlib import Path

import pytest
from repositories import repository

from hpcddp.errors import UserError
from hpcddp.planning import code_files
from hpcddp.planning.project import code_checks


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return repository(tmp_path)


def test_what_is_read_where_it_lies_is_told(root: Path, tmp_path: Path) -> None:
    code = code_files.find(root, tmp_path / "runs")
    words = ["python", str(root / "pkg/code.py"), "pkg/code.py", str(root / "data/deep/big")]
    assert code_checks.bypassed(code, words) == [str(root / "pkg/code.py")]


@pytest.mark.parametrize("word", ["../data", "--data=../data", "..", "pkg/../../x/../../data"])
def test_a_path_that_leads_out_of_the_copy_is_refused(
    root: Path, tmp_path: Path, word: str
) -> None:
    code = code_files.find(root, tmp_path / "runs")
    if word.startswith("pkg"):  # it begins in the copy, and is a word like any other
        code_checks.check_paths(code, [word])
        return
    with pytest.raises(UserError, match="is outside of") as caught:
        code_checks.check_paths(code, ["python", "train.py", word])
    assert "--no-snapshot" in caught.value.hint
    inner = code_files.find(root / "pkg", tmp_path / "runs")
    code_checks.check_paths(inner, ["python", "../train.py"])  # from a folder of the repository


@pytest.mark.parametrize("name", [".env", "keys/id_rsa", "tls.pem", ".env.local", "kaggle.json"])
def test_what_looks_like_a_secret_is_refused(root: Path, tmp_path: Path, name: str) -> None:
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).write_text("x")
    with pytest.raises(UserError, match="may be a secret") as caught:
        code_checks.check(code_files.find(root, tmp_path), 10**6)
    assert name in caught.value.what and ".gitignore" in caught.value.hint
    (root / ".gitignore").write_text(name)
    code_checks.check(code_files.find(root, tmp_path), 10**6)


def test_examples_of_secrets_are_none(root: Path, tmp_path: Path) -> None:
    (root / ".env.example").write_text("x")
    code_checks.check(code_files.find(root, tmp_path), 10**6)


def test_too_much_is_refused_by_its_largest_files(root: Path, tmp_path: Path) -> None:
    (root / "weights.bin").write_bytes(b"0" * 2_000_000)
    with pytest.raises(UserError, match=r"2 MB in 4 files, more than 1 MB; .* weights.bin"):
        code_checks.check(code_files.find(root, tmp_path), 10**6)
