"""The messages that a person can meet, read from the code: `python tests/support/messages.py`.

Errors, hints, notes, warnings, findings, help, and the log lines of templates: place, and text.
"""

import ast
import re
from collections.abc import Iterator

from sites import CHECKOUT

# Functions and classes whose arguments are messages, besides the errors.
SPEAKERS = {
    "CheckFinding", "Choice", "Key", "Problem", "Row", "UsageError", "_Requirement", "_go_on",
    "_refusal", "_say", "argument", "echo", "fail", "key", "note", "option", "print", "prompt",
    "report", "say", "table", "warning",
}  # fmt: skip
ERROR = re.compile(r".*(Error|Refused|Unreachable|Missing|Unreadable|Damaged|Lost|Unfit)$")
# Variables that hold messages.
NAMES = {"hint", "what", "text", "message", "reason", "why", "words", "title", "help"}
SAYS = re.compile(r"(?:echo|printf)\s+[\"'](hpcddp[^\"']*)")


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
    for node in ast.walk(tree):
        parts: list[ast.expr] = []
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in SPEAKERS or ERROR.match(name):
                parts = [*node.args, *(keyword.value for keyword in node.keywords)]
        elif isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign) and node.value:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id in NAMES for target in targets):
                parts = [node.value]
        elif isinstance(node, ast.FunctionDef):
            marks = " ".join(map(ast.unparse, node.decorator_list))
            if ("command" in marks or "group" in marks) and (text := ast.get_docstring(node)):
                yield node.lineno, text
        yield from ((node.lineno, text) for part in parts for text in _strings(part))


def _strings(node: ast.expr) -> Iterator[str]:
    """The texts in an expression; {} stands for a value."""
    for part in ast.walk(node):
        text = ""
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            text = part.value
        elif isinstance(part, ast.JoinedStr):
            text = "".join(
                str(piece.value) if isinstance(piece, ast.Constant) else "{}"
                for piece in part.values
            )
        if len(text.split()) > 1:
            yield text


if __name__ == "__main__":
    for each, place in all_messages().items():
        print(f"{place}\t{each}")
