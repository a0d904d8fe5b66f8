"""Step 3: checks of the code snapshot: its files, and whether the command reads it."""

from __future__ import annotations

import fnmatch
import os
import re
import site
from collections.abc import Sequence
from pathlib import Path, PurePath

from hpcddp.errors import UserError
from hpcddp.planning import code_files
from hpcddp.planning.code_files import CodeFiles
from hpcddp.sizes import counted
from hpcddp.spec import JobSpec

SECRETS = (
    ".env", ".env.*", "*.pem", "*.key", "*.p12", "*.pfx", "id_rsa", "id_dsa", "id_ecdsa",
    "id_ed25519", ".netrc", ".pypirc", ".npmrc", ".git-credentials", "credentials",
    "credentials.json", "*.kdbx", ".htpasswd", "kaggle.json", "secrets.*",
)  # fmt: skip
HARMLESS = ("*.example", "*.sample", "*.template", "*.dist")


def checked(job: JobSpec, folder: Path, runs: Path) -> CodeFiles:
    """The checked files of a job's code snapshot."""
    code = code_files.find(folder, runs)
    check(code, job.snapshot_mb * 10**6)
    check_paths(code, job.command)
    return code


def check(code: CodeFiles, limit: int) -> None:
    """Refuse files that may be secrets, and more bytes than the limit.

    Args:
        limit: bytes.

    Raises:
        UserError: names the files.
    """
    aside = (
        "let git ignore these files: they are then linked, not copied (.gitignore; `git rm "
        "--cached FILE` if git tracks one; `git init` without a repository); or use --no-snapshot"
    )
    secrets = [path for path in code.files if _is_secret(PurePath(path).name)]
    if secrets:
        what = f"{_some(secrets)} may be a secret, which is not allowed in a code snapshot"
        raise UserError(what, where=str(code.root), hint=aside)
    if code.size > limit:
        large = sorted(code.files, key=lambda path: -code.files[path])
        raise UserError(
            f"the code is {code.size / 1e6:.0f} MB in {counted(len(code.files), 'file')}, more "
            f"than {limit / 1e6:.0f} MB; the largest are {_some(large)}",
            where=str(code.root),
            hint=f"{aside}; or raise the limit with --set snapshot_mb=MB",
        )


def _is_secret(name: str) -> bool:
    if any(fnmatch.fnmatch(name, pattern) for pattern in HARMLESS):
        return False
    return any(fnmatch.fnmatch(name, pattern) for pattern in SECRETS)


def _some(paths: list[str]) -> str:
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return ", ".join(paths[:3]) + more


def check_paths(code: CodeFiles, words: Sequence[str]) -> None:
    """Refuse relative paths of a command that leave the copied folder: from the code snapshot they
    would lead to another place.

    Raises:
        UserError: names the first.
    """
    for word in words:
        for text in (word, word.partition("=")[2]):
            target = Path(os.path.normpath(code.root / code.below / text))
            if PurePath(text).parts[:1] == ("..",) and not target.is_relative_to(code.root):
                raise UserError(
                    f"{text} is outside of {code.root}, and the job works in a copy of it",
                    where="command",
                    hint=f"write {target}, or use --no-snapshot",
                )


def bypassed(code: CodeFiles, words: Sequence[str]) -> list[str]:
    """Code that a command reads from the folder, not from the code snapshot: absolute paths, and
    packages that are installed in editable mode."""
    roots = (str(code.root), os.path.abspath(code.root))  # noqa: PTH100
    texts = [word for word in words if word.startswith(tuple(f"{root}/" for root in roots))]
    copied = [text for text in texts if _relative(code, text) in code.files]
    for path in map(Path, site.getsitepackages()):
        copied += [
            f"the package of {file.name}"
            for file in (*path.glob("*.pth"), *path.glob("__editable__*_finder.py"))
            if _names(file.read_text(errors="replace"), roots)
        ]
    return copied


def _names(text: str, roots: Sequence[str]) -> bool:
    """Whether a text contains the path of one of the folders, or a path below."""
    return any(re.search(rf"{re.escape(root)}(?![^/'\"\s])", text) for root in roots)


def _relative(code: CodeFiles, text: str) -> str:
    return str(Path(text).resolve()).removeprefix(f"{code.root}/")
