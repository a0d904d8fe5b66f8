"""The messages that a person can meet, read from the code: `python tests/support/messages.py`.

All strings of the modules but docstrings, the help of commands, and the log lines of templates:
place, and text. A few are no messages, such as patterns with blanks; no test minds them.
"""

import ast
import re
from collections.abc import Iterator

from sites import CHECKOUT

SAYS = re.compile(r"(?:echo|printf)\s+[\"'](hpcddp[^\"']*)")
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def all_messages() -> dict[str, str]:
    """Each text of at least two words -> the first place where it stands."""
    texts: dict[str, str] = {}
    for path in sorted((CHECKOUT / "hpcddp").rglob("*.py")):
        for line, text in _of_module(ast.parse(path.read_text(encoding="utf-8"))):
            texts.setdefault(" ".join(text.split()), f"{path.relative_to(CHECKOUT)}:{line}")
    for path in sorted((CHECKOUT / "templates").rglob("*.j2")):
        for line, row in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if match := SAYS.search(row):
                texts.setdefault(match[1], f"{path.relative_to(CHECKOUT)}:{line}")
    return texts


def _of_module(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text; {} stands for a value."""
    parts: set[ast.AST] = set()  # strings that are no text of their own
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) and not _is_command(node):
            parts.add(node.body[0].value)  # type: ignore[attr-defined]
        elif isinstance(node, ast.JoinedStr):
            parts.update(node.values)
    for node in ast.walk(tree):
        text = ""
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in parts:
            text = node.value
        elif isinstance(node, ast.JoinedStr) and node not in parts:
            text = "".join(
                str(piece.value) if isinstance(piece, ast.Constant) else "{}"
                for piece in node.values
            )
        if len(text.split()) > 1:
            yield node.lineno, text


def _is_command(node: DOCUMENTED) -> bool:
    """Whether a docstring is the help of a command."""
    marks = " ".join(map(ast.unparse, getattr(node, "decorator_list", ())))
    return "command" in marks or "group" in marks


if __name__ == "__main__":
    for each, place in all_messages().items():
        print(f"{place}\t{each}")
