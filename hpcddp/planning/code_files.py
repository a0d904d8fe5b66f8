"""Before step 3: the files of a command's code snapshot, the working folder of its run.

A run works on the code at submission: the files that git tracks, or would track. Ignored files
(data, environments) become links to the originals. A link that leaves the folder stays a link.
Without git, each file of at most 1 MB belongs to the code, unless it is hidden, or in an
environment or a cache. submit/code_snapshot.py copies the files.
"""

from __future__ import annotations

import fnmatch
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from hpcddp.errors import UserError
from hpcddp.sizes import counted

CACHE = "__pycache__"  # neither copied nor linked: other runs have other code
SKIPPED = (CACHE, "node_modules", "*.egg-info")  # without git
MARKERS = {".gitkeep", ".keep", ".gitignore"}  # the only files of a folder for outputs
GIT_SECONDS = 120
LARGE = 1_000_000  # bytes; without git a larger file is linked
MANY = 10_000  # files, without git


@dataclass
class CodeFiles:
    """The parts of a working folder. Paths are relative to the root.

    Args:
        root: the copied folder: the repository, or the current folder.
        below: the command's folder in it.
        files: path -> size in bytes.
        links: path -> target, for ignored files and folders, and for links.
        folders: folders that may be empty, as keys.
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


def find(folder: Path, runs: Path) -> CodeFiles:
    """The files that belong to the code in a folder.

    Args:
        runs: the folder of the runs, which never belongs to the code.

    Raises:
        UserError: git fails, or there is no git and too many files.
    """
    folder, runs = folder.resolve(), runs.resolve()
    root = _repository(folder)
    code = CodeFiles(root or folder, PurePath(folder.relative_to(root or folder)))
    files, ignored = _tracked(root, runs) if root else _walked(folder, runs)
    for path in sorted(ignored):  # a folder before what lies in it
        if PurePath(path).name != CACHE and not _is_linked(code, path):
            code.links[path] = str(code.root / path)
    for path in files:
        if not _is_linked(code, path):
            _take(code, path)
    _link_outputs(code, bool(root))
    return code


def _repository(folder: Path) -> Path | None:
    """The root of a folder's repository; None if there is none, or if it ignores the folder."""
    if not any((above / ".git").exists() for above in (folder, *folder.parents)):
        return None
    root = Path(_git(folder, "rev-parse", "--show-toplevel")[0]).resolve()
    if root != folder and _git(root, "check-ignore", "--", str(folder), codes=(0, 1)):
        return None
    return root


def _git(folder: Path, *words: str, codes: Sequence[int] = (0,), text: str = "") -> list[str]:
    """The lines that git prints, split at zeros with -z.

    Raises:
        UserError: git is not installed, fails or hangs.
    """
    hint = "fix this, or use --no-snapshot"
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            input=os.fsencode(text), capture_output=True, check=False, timeout=GIT_SECONDS,
        )  # fmt: skip
    except FileNotFoundError:
        what = "the folder is a git repository, but git is not installed"
        hint = "install git, or use --no-snapshot"
        raise UserError(what, where=str(folder), hint=hint) from None
    except subprocess.TimeoutExpired:
        what = f"git {words[0]} takes more than {GIT_SECONDS} s"
        raise UserError(what, where=str(folder), hint=hint) from None
    if done.returncode not in codes:
        error = os.fsdecode(done.stderr).strip().partition("\n")[0]
        raise UserError(f"git {words[0]}: {error}", where=str(folder), hint=hint)
    parts = os.fsdecode(done.stdout).split("\0" if "-z" in words else "\n")
    return [part for part in parts if part]


def _tracked(root: Path, runs: Path) -> tuple[list[str], list[str]]:
    """Two lists: files that git tracks or would track, and empty folders, with a slash at the end;
    and ignored paths, of a completely ignored folder only the folder."""
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
        else:  # a submodule that is not checked out
            files.append(f"{path}/")
    return files, [path.rstrip("/") for path in ignored]


def _walked(root: Path, runs: Path) -> tuple[list[str], list[str]]:
    """The same two lists without git, which ignores hidden or large files, environments and
    caches."""
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
                f"the folder has more than {MANY} files and is not a git repository",
                where=str(root),
                hint="run `git init` and list the data in .gitignore, or use --no-snapshot",
            )
    return files, links


def _is_aside(folder: Path) -> bool:
    """Whether a folder is hidden, a cache or an environment, and so has no code."""
    if folder.name.startswith(".") or any(fnmatch.fnmatch(folder.name, p) for p in SKIPPED):
        return True
    return any((folder / mark).exists() for mark in ("pyvenv.cfg", "conda-meta"))


def _link_outputs(code: CodeFiles, git: bool) -> None:
    """Link each folder with only a marker (`out/*` and `!out/.gitkeep` in .gitignore): the job's
    outputs belong in the original folder."""
    holds: dict[str, set[str]] = {}
    for path in code.files:
        for above in PurePath(path).parents[:-1]:
            holds.setdefault(str(above), set()).add(PurePath(path).name)
    marked = sorted(folder for folder, names in holds.items() if names <= MARKERS)
    if not git or not marked:
        return
    asked = "".join(f"{folder}/hpcddp-output\n" for folder in marked)
    ignored = _git(code.root, "check-ignore", "--stdin", codes=(0, 1), text=asked)
    for folder in (path.rpartition("/")[0] for path in ignored):
        for kind in (code.files, code.links, code.folders):
            for path in [p for p in kind if p == folder or p.startswith(f"{folder}/")]:
                del kind[path]
        code.links[folder] = str(code.root / folder)


def _is_linked(code: CodeFiles, path: str) -> bool:
    """Whether a path, or a folder above it, is a link to the original."""
    return any(str(part) in code.links for part in (PurePath(path), *PurePath(path).parents))


def _take(code: CodeFiles, path: str) -> None:
    """Add one path to the files, links or folders."""
    full = code.root / path
    if path.endswith("/"):
        code.folders[path.rstrip("/")] = None
        return
    if full.is_symlink():
        target = Path(os.path.normpath(full.parent / full.readlink()))
        inside = target.is_relative_to(code.root)
        code.links[path] = os.path.relpath(target, full.parent) if inside else str(target)
    elif full.is_file():
        code.files[path] = full.stat().st_size


def rows(code: CodeFiles) -> Iterator[str]:
    """The files and links of a code snapshot, a line each, and their sum."""
    for path, size in sorted(code.files.items()):
        yield f"{size:>12,}  {path}"
    for path, target in sorted(code.links.items()):
        yield f"{'link':>12}  {path} -> {target}"
    files, links = counted(len(code.files), "file"), counted(len(code.links), "link")
    yield f"{code.size:>12,}  bytes in {files}, {links}"
