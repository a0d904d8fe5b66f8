"""host.pyz, away from the package that made it."""

import ast
import py_compile
import subprocess
import sys
import zipfile
from io import BytesIO
from pathlib import Path

from hpcddp.submit import host_archive


def test_it_runs_alone(tmp_path: Path) -> None:
    """Isolated, in an empty environment, without the folder of the package on the path."""
    archive = tmp_path / "host.pyz"
    archive.write_bytes(host_archive.build())
    done = subprocess.run(
        [sys.executable, "-I", "-S", archive, "begin", tmp_path / "gone", "1"],
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
            ast.parse(archive.read(name), name, feature_version=(3, 9))


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
