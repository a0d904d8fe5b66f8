"""host.pyz, away from the package that made it."""

import ast
import os
import py_compile
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest

from hpcddp.submit import host_archive


def pythons() -> Iterator[str]:
    """This Python, and the oldest that is to run it, where it is installed."""
    yield sys.executable
    for folder in (*os.get_exec_path(), *map(str, Path.home().glob(".pyenv/versions/3.9.*/bin"))):
        python = shutil.which("python3.9", path=folder)
        if (
            python
            and not subprocess.run([python, "-V"], capture_output=True, check=False).returncode
        ):
            yield python
            return


@pytest.mark.parametrize("python", [*pythons()])
def test_it_runs_alone(tmp_path: Path, python: str) -> None:
    """Isolated, in an empty environment, without the folder of the package on the path."""
    archive = tmp_path / "host.pyz"
    archive.write_bytes(host_archive.build())
    done = subprocess.run(
        [python, "-I", "-S", archive, "begin", tmp_path / "gone", "1"],
        env={}, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 3
    assert "there is no run here" in done.stderr


def test_an_older_python_can_read_it() -> None:
    with zipfile.ZipFile(BytesIO(host_archive.build())) as archive:
        names = [name for name in archive.namelist() if name.endswith(".py")]
        assert {"hpcddp/attempt/host.py", "hpcddp/slurm/commands.py", "hpcddp/rundir.py"} < {*names}
        assert not {name for name in names if "/train/" in name}
        for name in names:
            tree = ast.parse(archive.read(name), name, feature_version=(3, 9))
            assert [f"{name}:{line}" for line in unions(tree)] == []


def unions(tree: ast.Module) -> Iterator[int]:
    """The lines at which importing a module makes a union of types, which Python 3.10 brought."""
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop()
        if isinstance(node, (ast.FunctionDef, ast.Lambda)) or is_for_types(node):
            continue
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            sides = (node.left, node.right)
            if any(isinstance(x, ast.Subscript) or ast.unparse(x) in TYPES for x in sides):
                yield node.lineno
        left += [x for name, x in ast.iter_fields(node) if isinstance(x, ast.AST)
                 and name != "annotation"]  # fmt: skip
        left += [x for _, xs in ast.iter_fields(node) if isinstance(xs, list) for x in xs]


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


TYPES = {"None", "str", "int", "float", "bytes", "bool", "list", "dict", "tuple", "set", "Any"}


def test_a_union_that_is_made_at_import_is_seen() -> None:
    told = "from __future__ import annotations\nx: int | None = 1\ny = list[str | int]\n"
    told += "def f(a: int | None) -> None: pass\nz = 1 | 2\nclass C:\n    d = str | None\n"
    assert sorted(unions(ast.parse(told))) == [3, 7]


def test_each_module_finds_in_it_what_it_imports(tmp_path: Path) -> None:
    """Alone, one after the other, and what their functions import too."""
    archive = tmp_path / "host.pyz"
    archive.write_bytes(host_archive.build())
    names = [".".join(path.relative_to(host_archive.PACKAGE.parent).with_suffix("").parts)
             for path in host_archive.packed()]  # fmt: skip
    inner = [
        ast.unparse(node)
        for path in host_archive.packed()
        if path.parent != host_archive.PACKAGE
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hpcddp")
    ]
    lines = [*(f"import {name.removesuffix('.__init__')}" for name in names), *inner]
    code = "\n".join([f"import sys; sys.path.insert(0, {str(archive)!r})", *lines])
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code],
        env={}, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_what_is_compiled_is_taken_as_long_as_it_is_of_this_source(tmp_path: Path) -> None:
    """Nobody compares it later, so it must be that of the source."""
    source = tmp_path / "some.py"
    source.write_text("VALUE = 1\n")
    assert host_archive.compiled(source) == b""
    py_compile.compile(str(source))
    kept = host_archive.compiled(source)
    source.write_text("VALUE = 22\n")
    assert host_archive.compiled(source) == b""
    (tmp_path / "alone.pyc").write_bytes(kept)
    done = subprocess.run(
        [sys.executable, "-c", "import alone; print(alone.VALUE)"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "1\n"
