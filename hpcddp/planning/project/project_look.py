"""What a project folder holds: the scripts that train, and how. Nothing is imported or run."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpcddp.errors import UserError
from hpcddp.planning.project import outside_paths

MOST = 400  # files that are read
LARGEST = 10**6  # bytes of a file that is read
DEPTH = 2  # folders below the project
ASIDE = {"tests", "test", "docs", "build", "dist", "node_modules", "site-packages", "runs"}
NAMES = ("train", "main", "run", "finetune", "pretrain")  # of scripts, the likeliest first
# Kind of a script -> modules of which it imports one; the first kind that fits counts.
IMPORTS = {
    "Horovod": ("horovod",),
    "Lightning": ("lightning", "pytorch_lightning", "lightning_fabric"),
    "Accelerate": ("accelerate",),
    "transformers": ("transformers",),
    "DDP": ("torch.distributed", "torch.nn.parallel"),
    "torch": ("torch",),
}
TASK = "task"  # a module of hpcddp's own form
SHELL = "shell"  # a script that is no Python
TASK_PARTS = {"model", "dataset", "loss"}


@dataclass(frozen=True)
class ScriptFile:
    """A script or a task module.

    Args:
        path: from the project folder.
        kind: a name in IMPORTS, `task` or `shell`.
        outside: relative paths in it that lead out of the project, and exist.
    """

    path: Path
    kind: str
    outside: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        """The command that runs it."""
        if self.kind != SHELL:
            return ["python", str(self.path)]
        return ["bash", str(self.path)] if self.path.suffix == ".sh" else [f"./{self.path}"]


def candidates(folder: Path) -> list[ScriptFile]:
    """The scripts and task modules of a project, the likeliest first."""
    rows = (_look(folder, path) for path in _files(folder))
    return sorted(filter(None, rows), key=_rank)


def named(folder: Path, name: str) -> ScriptFile:
    """The script that a user names.

    Raises:
        UserError: there is none, or it lies outside of the project.
    """
    path = Path(os.path.normpath(folder / name))
    if not path.is_file():
        raise UserError(f"script {name!r} not found", where="SCRIPT", hint="check the path")
    if not path.is_relative_to(folder):
        hint = "go to the project's folder first, or submit it with `hpcddp submit -- COMMAND`"
        raise UserError(f"{name} is outside of this folder", where="SCRIPT", hint=hint)
    kind = "Python" if path.suffix == ".py" else SHELL
    return _look(folder, path) or ScriptFile(path.relative_to(folder), kind)


def _rank(row: ScriptFile) -> tuple[int, int, int, str]:
    kinds = [TASK, *IMPORTS]
    name = row.path.stem
    likely = next((i for i, each in enumerate(NAMES) if name.startswith(each)), len(NAMES))
    plain = kinds.index(row.kind) == len(kinds) - 1  # torch alone trains in one process
    return plain, likely, len(row.path.parts), str(row.path)


def _files(folder: Path) -> Iterator[Path]:
    """The Python files of a project, those at its top first."""
    count = 0
    for place, folders, names in os.walk(folder):
        depth = len(Path(place).relative_to(folder).parts)
        folders[:] = sorted(
            name for name in folders
            if depth < DEPTH and name not in ASIDE and not name.startswith((".", "_"))
            and not Path(place, name, "pyvenv.cfg").exists()
        )  # fmt: skip
        for name in sorted(names):
            if name.endswith(".py") and count < MOST:
                count += 1
                yield Path(place, name)


def _look(folder: Path, path: Path) -> ScriptFile | None:
    """The candidate in a file; None if it does not train, or cannot be read."""
    try:
        if path.stat().st_size > LARGEST:
            return None
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    relative = path.relative_to(folder)
    if functions >= TASK_PARTS:
        return ScriptFile(relative, TASK)
    imported = set(_imported(tree))
    kind = next((kind for kind, names in IMPORTS.items() if _any(imported, names)), "")
    if not kind or not _starts(tree):
        return None
    outside = outside_paths.find(tree, relative, folder)
    return ScriptFile(relative, kind, tuple(sorted(set(outside))))


def _any(imported: set[str], names: tuple[str, ...]) -> bool:
    return any(word == name or word.startswith(f"{name}.") for word in imported for name in names)


def _imported(tree: ast.Module) -> Iterator[str]:
    """The modules that a file imports, by their whole names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _starts(tree: ast.Module) -> bool:
    """Whether a file does something when it is run: a library only defines names."""
    kinds = (ast.Expr, ast.If, ast.For, ast.While, ast.With, ast.Try)
    return any(
        isinstance(node, kinds)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        and not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        for node in tree.body
    )
