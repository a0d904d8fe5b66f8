"""Frozen inputs: a run works on the code as it was when it was submitted.

What git tracks, or would track, is stored once per content beside the runs (RUNS/.code), read-only,
and linked into a working folder of the run's own. What git ignores (data, environments) is linked
to where it lies, and a link that leaves the folder stays a link: nothing of that is copied. Without
git every file below 1 MB counts that is not hidden, or in an environment or a cache.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
import shutil
import site
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from hpcddp.errors import UserError
from hpcddp.rundir import write_bytes

STORE = ".code"
SECRETS = (
    ".env", ".env.*", "*.pem", "*.key", "*.p12", "*.pfx", "id_rsa", "id_dsa", "id_ecdsa",
    "id_ed25519", ".netrc", ".pypirc", ".npmrc", ".git-credentials", "credentials",
    "credentials.json", "*.kdbx", ".htpasswd", "kaggle.json", "secrets.*",
)  # fmt: skip
HARMLESS = ("*.example", "*.sample", "*.template", "*.dist")
CACHE = "__pycache__"  # neither copied nor linked: runs of other code would share it
SKIPPED = (CACHE, "node_modules", "*.egg-info")  # where there is no git to say so
MARKERS = {".gitkeep", ".keep", ".gitignore"}  # of folders that are to be there, empty
GIT_SECONDS = 120
LARGE = 1_000_000  # bytes of a file that is linked there
MANY = 10_000  # files
EXECUTABLE = 0o111


@dataclass
class Inputs:
    """What a working folder is made of. Paths are relative to the root.

    Args:
        root: the folder that is frozen: git's, or the current one.
        below: the command's folder in it.
        files: path -> size in bytes.
        links: path -> where it points: what is ignored, and links.
        folders: those that may be empty, as keys.
    """

    root: Path
    below: PurePath
    files: dict[str, int] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    folders: dict[str, None] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(self.files.values())


def find(folder: Path, runs: Path) -> Inputs:
    """What belongs to the code in a folder; nothing is copied yet.

    Args:
        runs: the folder of the runs, which is never a part of it.

    Raises:
        UserError: git fails, or without it there are too many files.
    """
    folder, runs = folder.resolve(), runs.resolve()
    root = _repository(folder)
    found = Inputs(root or folder, PurePath(folder.relative_to(root or folder)))
    ours, ignored = _tracked(root, runs) if root else _walked(folder, runs)
    for path in sorted(ignored):  # a folder before what lies in it
        if PurePath(path).name != CACHE and not _is_linked(found, path):
            found.links[path] = str(found.root / path)
    for path in ours:
        if not _is_linked(found, path):
            _take(found, path)
    _link_outputs(found, bool(root))
    return found


def _repository(folder: Path) -> Path | None:
    """The root of the repository that a folder belongs to; None if it is in none, or ignored."""
    if not any((above / ".git").exists() for above in (folder, *folder.parents)):
        return None
    root = Path(_git(folder, "rev-parse", "--show-toplevel")[0]).resolve()
    if root != folder and _git(root, "check-ignore", "--", str(folder), codes=(0, 1)):
        return None
    return root


def _git(folder: Path, *words: str, codes: Sequence[int] = (0,), text: str = "") -> list[str]:
    """What git says, split at line ends or zeros.

    Raises:
        UserError: it is not here, fails or hangs: an empty answer would freeze nothing.
    """
    hint = "mend that, or take --no-snapshot"
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            input=os.fsencode(text), capture_output=True, check=False, timeout=GIT_SECONDS,
        )  # fmt: skip
    except FileNotFoundError:
        what = "git is not here, and the folder is a repository of it"
        raise UserError(what, where=str(folder), hint=hint) from None
    except subprocess.TimeoutExpired:
        what = f"git {words[0]} takes more than {GIT_SECONDS} s"
        raise UserError(what, where=str(folder), hint=hint) from None
    if done.returncode not in codes:
        said = os.fsdecode(done.stderr).strip().partition("\n")[0]
        raise UserError(f"git {words[0]}: {said}", where=str(folder), hint=hint)
    parts = os.fsdecode(done.stdout).split("\0" if "-z" in words else "\n")
    return [part for part in parts if part]


def _tracked(root: Path, runs: Path) -> tuple[list[str], list[str]]:
    """Files that git tracks or would track, empty folders with a slash at their end, and what it
    ignores, whole folders as one."""
    words = ["ls-files", "-z", "--others", "--exclude-standard"]
    if runs.is_relative_to(root) and runs != root:
        words.append(f"--exclude=/{runs.relative_to(root)}/")
    ignored = _git(root, *words, "--ignored", "--directory")
    files = [p for p in _git(root, *words, "--directory") if p.endswith("/")]
    for path in dict.fromkeys(_git(root, *words, "--cached")):
        inner = root / path
        if inner.is_symlink() or not inner.is_dir():
            files.append(path)
        elif (inner / ".git").exists():  # a repository in this one
            more, hidden = _tracked(inner, runs)
            files += [f"{path.rstrip('/')}/{name}" for name in more]
            ignored += [f"{path.rstrip('/')}/{name}" for name in hidden]
        else:  # a submodule that was not fetched
            files.append(f"{path}/")
    return files, [path.rstrip("/") for path in ignored]


def _walked(root: Path, runs: Path) -> tuple[list[str], list[str]]:
    """The same without git: environments, caches, what is hidden or large are linked."""
    files: list[str] = []
    links: list[str] = []
    for folder, folders, names in os.walk(root):
        here = Path(folder).relative_to(root)
        for name in list(folders):
            path = Path(folder, name)
            if path.is_symlink():
                names.append(name)
            elif path == runs or _is_aside(path):
                links.append(str(here / name))
            else:
                files.append(f"{here / name}/")
                continue
            folders.remove(name)
        for name in names:
            path = Path(folder, name)
            large = not path.is_symlink() and path.stat().st_size > LARGE
            (links if large or name.startswith(".") else files).append(str(here / name))
        if len(files) > MANY:
            raise UserError(
                f"there are more than {MANY} files, and no git to tell which of them are code",
                where=str(root),
                hint="run git init and name the data in .gitignore, or take --no-snapshot",
            )
    return files, links


def _is_aside(folder: Path) -> bool:
    """Whether a folder is no code: hidden, a cache, or an environment."""
    if folder.name.startswith(".") or any(fnmatch.fnmatch(folder.name, p) for p in SKIPPED):
        return True
    return any((folder / mark).exists() for mark in ("pyvenv.cfg", "conda-meta"))


def _link_outputs(found: Inputs, git: bool) -> None:
    """Link whole folders that hold but a marker (`out/*` and `!out/.gitkeep`): what is written
    there is to stay there."""
    holds: dict[str, set[str]] = {}
    for path in found.files:
        for above in PurePath(path).parents[:-1]:
            holds.setdefault(str(above), set()).add(PurePath(path).name)
    marked = sorted(folder for folder, names in holds.items() if names <= MARKERS)
    if not git or not marked:
        return
    asked = "".join(f"{folder}/hpcddp-output\n" for folder in marked)
    said = _git(found.root, "check-ignore", "--stdin", codes=(0, 1), text=asked)
    for folder in (path.rpartition("/")[0] for path in said):
        for kind in (found.files, found.links, found.folders):
            for path in [p for p in kind if p == folder or p.startswith(f"{folder}/")]:
                del kind[path]
        found.links[folder] = str(found.root / folder)


def _is_linked(found: Inputs, path: str) -> bool:
    """Whether a path is a link to where it lies, or in a folder that is one."""
    return any(str(part) in found.links for part in (PurePath(path), *PurePath(path).parents))


def _take(found: Inputs, path: str) -> None:
    """Sort one path in: a file, a link or a folder."""
    full = found.root / path
    if path.endswith("/"):
        found.folders[path.rstrip("/")] = None
        return
    if full.is_symlink():
        target = full.readlink()
        there = Path(os.path.normpath(full.parent / target))
        inside = there.is_relative_to(found.root)
        found.links[path] = os.path.relpath(there, full.parent) if inside else str(there)
    elif full.is_file():
        found.files[path] = full.stat().st_size


def check(found: Inputs, limit: int) -> None:
    """Refuse what looks like a secret, and more bytes than code has.

    Args:
        limit: bytes.

    Raises:
        UserError: names the files.
    """
    aside = "name it in .gitignore: it is linked then, and not copied; or take --no-snapshot"
    secrets = [path for path in found.files if _is_secret(PurePath(path).name)]
    if secrets:
        what = f"{_some(secrets)} looks like a secret, which a copy of the code must not hold"
        raise UserError(what, where=str(found.root), hint=aside)
    if found.size > limit:
        large = sorted(found.files, key=lambda path: -found.files[path])
        raise UserError(
            f"the code is {found.size / 1e6:.0f} MB in {len(found.files)} files, more than "
            f"{limit / 1e6:.0f} MB; the largest are {_some(large)}",
            where=str(found.root),
            hint=f"{aside}; snapshot_mb allows more",
        )


def _is_secret(name: str) -> bool:
    if any(fnmatch.fnmatch(name, pattern) for pattern in HARMLESS):
        return False
    return any(fnmatch.fnmatch(name, pattern) for pattern in SECRETS)


def _some(paths: list[str]) -> str:
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return ", ".join(paths[:3]) + more


def copy(found: Inputs, runs: Path, folder: Path) -> None:
    """Make a run's working folder; each content is stored once for all runs.

    Raises:
        UserError: it cannot be written.
    """
    try:
        (runs / STORE).mkdir(exist_ok=True, mode=0o700)
        for path in found.files:
            _place(found.root / path, runs / STORE, folder / path)
        for path in found.folders:
            (folder / path).mkdir(parents=True, exist_ok=True)
        for path, target in found.links.items():
            made = folder / path
            made.parent.mkdir(parents=True, exist_ok=True)
            made.symlink_to(target)
        (folder / found.below).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        where = str(error.filename or folder)
        raise UserError(
            f"the code cannot be copied: {error.strerror}", where=where,
            hint="make room or mend its mode; --no-snapshot works in the folder itself",
        ) from None  # fmt: skip


def _place(source: Path, store: Path, path: Path) -> None:
    """Put a file's content under a path, from the store."""
    data = source.read_bytes()
    kept = source.stat().st_mode & EXECUTABLE
    name = hashlib.sha256(data).hexdigest() + ("x" if kept else "")
    stored = store / name[:2] / name
    if not stored.exists() or stored.read_bytes() != data:  # root can write into what is read-only
        stored.parent.mkdir(exist_ok=True)
        write_bytes(stored, data, 0o444 | (kept and EXECUTABLE))
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.hardlink_to(stored)
    except OSError:  # a file system without hard links, or too many of them
        shutil.copy(stored, path)


def check_paths(found: Inputs, words: Sequence[str]) -> None:
    """Refuse relative paths of a command that lead out of what is copied: from the copy they lead
    into the run's own folder.

    Raises:
        UserError: names the first.
    """
    for word in words:
        for text in (word, word.partition("=")[2]):
            there = Path(os.path.normpath(found.root / found.below / text))
            if PurePath(text).parts[:1] == ("..",) and not there.is_relative_to(found.root):
                raise UserError(
                    f"{text} leads out of {found.root}, and the job works in a copy of it",
                    where="command",
                    hint=f"say {there}, or take --no-snapshot",
                )


def bypassed(found: Inputs, words: Sequence[str]) -> list[str]:
    """What of a command will be read where it lies, and not from the copy: full paths into the
    folder, and packages that this Python has from there."""
    roots = (str(found.root), os.path.abspath(found.root))  # noqa: PTH100
    texts = [word for word in words if word.startswith(tuple(f"{root}/" for root in roots))]
    copied = [text for text in texts if _relative(found, text) in found.files]
    for path in map(Path, site.getsitepackages()):
        copied += [
            f"the package of {file.name}"
            for file in (*path.glob("*.pth"), *path.glob("__editable__*_finder.py"))
            if _names(file.read_text(errors="replace"), roots)
        ]
    return copied


def _names(text: str, roots: Sequence[str]) -> bool:
    """Whether a text has the path of a folder, or one below it."""
    return any(re.search(rf"{re.escape(root)}(?![^/'\"\s])", text) for root in roots)


def _relative(found: Inputs, text: str) -> str:
    return str(Path(text).resolve()).removeprefix(f"{found.root}/")


def rows(found: Inputs) -> Iterator[str]:
    """What would be frozen, a line each."""
    for path, size in sorted(found.files.items()):
        yield f"{size:>12,}  {path}"
    for path, target in sorted(found.links.items()):
        yield f"{'link':>12}  {path} -> {target}"
    yield f"{found.size:>12,}  bytes in {len(found.files)} files, {len(found.links)} links"
