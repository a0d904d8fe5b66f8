"""Step 3: whether the files of a command's code may be copied, and whether it reads the copy."""

from __future__ import annotations

import fnmatch
import os
import re
import site
from collections.abc import Sequence
from pathlib import Path, PurePath

from hpcddp.errors import UserError
from hpcddp.planning.code_files import CodeFiles

SECRETS = (
    ".env", ".env.*", "*.pem", "*.key", "*.p12", "*.pfx", "id_rsa", "id_dsa", "id_ecdsa",
    "id_ed25519", ".netrc", ".pypirc", ".npmrc", ".git-credentials", "credentials",
    "credentials.json", "*.kdbx", ".htpasswd", "kaggle.json", "secrets.*",
)  # fmt: skip
HARMLESS = ("*.example", "*.sample", "*.template", "*.dist")


def check(code: CodeFiles, limit: int) -> None:
    """Refuse files that look like secrets, and more bytes than the limit.

    Args:
        limit: bytes.

    Raises:
        UserError: names the files.
    """
    aside = "name it in .gitignore: it is linked then, and not copied; or take --no-snapshot"
    secrets = [path for path in code.files if _is_secret(PurePath(path).name)]
    if secrets:
        what = f"{_some(secrets)} looks like a secret, which a copy of the code must not hold"
        raise UserError(what, where=str(code.root), hint=aside)
    if code.size > limit:
        large = sorted(code.files, key=lambda path: -code.files[path])
        raise UserError(
            f"the code is {code.size / 1e6:.0f} MB in {len(code.files)} files, more than "
            f"{limit / 1e6:.0f} MB; the largest are {_some(large)}",
            where=str(code.root),
            hint=f"{aside}; snapshot_mb allows more",
        )


def _is_secret(name: str) -> bool:
    if any(fnmatch.fnmatch(name, pattern) for pattern in HARMLESS):
        return False
    return any(fnmatch.fnmatch(name, pattern) for pattern in SECRETS)


def _some(paths: list[str]) -> str:
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return ", ".join(paths[:3]) + more


def check_paths(code: CodeFiles, words: Sequence[str]) -> None:
    """Refuse relative paths of a command that lead out of the copied folder: from the copy they
    would lead into the run's own folder.

    Raises:
        UserError: names the first.
    """
    for word in words:
        for text in (word, word.partition("=")[2]):
            target = Path(os.path.normpath(code.root / code.below / text))
            if PurePath(text).parts[:1] == ("..",) and not target.is_relative_to(code.root):
                raise UserError(
                    f"{text} leads out of {code.root}, and the job works in a copy of it",
                    where="command",
                    hint=f"say {target}, or take --no-snapshot",
                )


def bypassed(code: CodeFiles, words: Sequence[str]) -> list[str]:
    """Code that a command reads from the folder and not from its copy: full paths into the folder,
    and packages that are installed from there."""
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
    """Whether a text has the path of one of the folders, or one below it."""
    return any(re.search(rf"{re.escape(root)}(?![^/'\"\s])", text) for root in roots)


def _relative(code: CodeFiles, text: str) -> str:
    return str(Path(text).resolve()).removeprefix(f"{code.root}/")
