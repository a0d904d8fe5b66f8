"""Paths in a script that lead out of its project: a copy of the code would not find them."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

LONGEST = 1000  # characters of a path
JOINS = {"join", "joinpath", "Path", "PurePath", "PosixPath"}
SAME = {"abspath", "realpath", "normpath", "expanduser", "resolve", "absolute", "str", "fspath"}


def find(tree: ast.AST, file: Path, folder: Path) -> Iterator[str]:
    """The paths that lead out of a folder and exist, as far as they are constant.

    Args:
        tree: of the script.
        file: its path in the folder.
    """
    root = Path(os.path.realpath(folder))
    try:
        texts = list(_texts(tree, file))
    except RecursionError:  # an expression of a thousand parts
        return
    for text in texts:
        if ".." not in text or len(text) > LONGEST or "\0" in text or Path(text).is_absolute():
            continue
        target = Path(os.path.normpath(root / text))
        if not target.is_relative_to(root) and os.path.exists(target):  # noqa: PTH110 - no errors
            yield text


def _texts(node: ast.AST, file: Path) -> Iterator[str]:
    """The constant paths of a syntax tree, each as long as it is."""
    text = _path(node, file)
    if text is not None:
        if text != ".." or not isinstance(node, ast.Constant):  # a part of a longer path
            yield text
        return
    for child in ast.iter_child_nodes(node):
        yield from _texts(child, file)


def _path(node: ast.AST, file: Path) -> str | None:
    """The path that an expression makes, from the project's folder; None if it is none, or not
    constant."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Name(id="__file__"):
            return str(file)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return _joined([left, right], file)
        case ast.Attribute(value=value, attr="parent"):
            return _above(_path(value, file))
        case ast.Subscript(
            value=ast.Attribute(value=value, attr="parents"), slice=ast.Constant(value=int(count))
        ):
            top = _path(value, file)
            for _ in range(min(count + 1, LONGEST)):
                top = _above(top)
            return top
        case ast.Call(func=function, args=arguments):
            return _called(function, arguments, file)
    return None


def _called(function: ast.expr, arguments: list[ast.expr], file: Path) -> str | None:
    """The path that a call makes: of os.path, or of a Path."""
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    own = function.value if isinstance(function, ast.Attribute) else None
    if name == "dirname" and len(arguments) == 1:
        return _above(_path(arguments[0], file))
    if name == "joinpath" and own is not None:
        return _joined([own, *arguments], file)
    if name in JOINS and arguments:
        return _joined(arguments, file)
    if name in SAME:
        inner = arguments[0] if arguments else own
        return _path(inner, file) if inner is not None else None
    return None


def _joined(parts: list[ast.expr], file: Path) -> str | None:
    texts = [_path(part, file) for part in parts]
    return None if None in texts else str(Path(*(text for text in texts if text is not None)))


def _above(text: str | None) -> str | None:
    return None if text is None else os.path.normpath(Path(text, ".."))
