"""host.pyz, away from the package that made it."""

import ast
import subprocess
import sys
import zipfile
from io import BytesIO
from pathlib import Path

from hpcddp import hostapp


def test_it_runs_alone(tmp_path: Path) -> None:
    """Isolated, in an empty environment, without the folder of the package on the path."""
    archive = tmp_path / "host.pyz"
    archive.write_bytes(hostapp.build())
    done = subprocess.run(
        [sys.executable, "-I", "-S", archive, "begin", tmp_path / "gone", "1"],
        env={}, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 3
    assert "there is no run here" in done.stderr


def test_an_older_python_can_read_it() -> None:
    with zipfile.ZipFile(BytesIO(hostapp.build())) as archive:
        for name in archive.namelist():
            ast.parse(archive.read(name), name, feature_version=(3, 9))
