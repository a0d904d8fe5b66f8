"""Paths in a script that lead out of its project."""

import ast
from pathlib import Path

import pytest

from hpcddp.planning.project import outside_paths


@pytest.mark.parametrize(
    "text",
    [
        "open('../data')",
        "os.path.join('..', 'data')",
        "Path('..') / 'data'",
        "Path(__file__).parent.parent / 'data'",
        "Path(__file__).resolve().parents[1].joinpath('data')",
        "os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), 'data')",
    ],
)
def test_a_constant_path_is_found_however_it_is_written(tmp_path: Path, text: str) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "data").mkdir()
    found = outside_paths.find(ast.parse(text), Path("train.py"), tmp_path / "project")
    assert list(found) == ["../data"]


@pytest.mark.parametrize(
    "text",
    [
        "open('../missing')",
        "Path('.') / 'src'",
        "Path(__file__).parent / 'data'",
        "','.join(['..', x])",
        "Path(args.root, '..', 'data')",
        "print('see a/../b ..')",
        "open('/data/../etc')",
    ],
)
def test_what_stays_inside_or_is_not_constant_is_left_alone(tmp_path: Path, text: str) -> None:
    (tmp_path / "project/src").mkdir(parents=True)
    found = outside_paths.find(ast.parse(text), Path("train.py"), tmp_path / "project")
    assert list(found) == []


def test_a_file_in_a_subfolder_reaches_its_project(tmp_path: Path) -> None:
    (tmp_path / "project/data").mkdir(parents=True)
    tree = ast.parse("Path(__file__).parent.parent / 'data'")
    assert not list(outside_paths.find(tree, Path("src/train.py"), tmp_path / "project"))
