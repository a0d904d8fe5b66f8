"""What `pip install` brings."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

CHECKOUT = Path(__file__).parents[1]
SOURCES = ("hpcddp", "templates", "jobs")
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


def test_each_file_of_the_checkout_is_in_the_wheel(tmp_path: Path) -> None:
    copy, unwanted = tmp_path / "copy", shutil.ignore_patterns("__pycache__")
    for name in SOURCES:
        shutil.copytree(CHECKOUT / name, copy / name, ignore=unwanted)
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / name, copy)
    wanted = {
        str(path.relative_to(copy)) if name == "hpcddp" else f"hpcddp/{path.relative_to(copy)}"
        for name in SOURCES
        for path in (copy / name).rglob("*")
        if path.is_file()
    }
    done = subprocess.run(
        [sys.executable, "-c", BUILD, tmp_path], cwd=copy, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert wanted - {*archive.namelist()} == set()
