"""host.pyz: the modules that begin and end an attempt, as one file that any Python can run.

It lies in the run dir, so the decision needs neither the environment nor the package, which may be
upgraded or removed while the job waits. A host's own Python may be older: 3.9 is enough.
"""

from __future__ import annotations

import importlib.util
import io
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
FIRST = PACKAGE / "attempt" / "host.py"
# An import of ours, also inside a function; those of the root's modules are not needed there.
_IMPORT = re.compile(r"^( *)from (hpcddp[\w.]*) import (?:\(([^)]+)\).*|(.+))$", re.M)
UNCHECKED = (1).to_bytes(4, "little")
MAIN = "from hpcddp.attempt.host import run\n\nrun()\n"


def build() -> bytes:
    """The archive, of the installed version."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("__main__.py", MAIN)
        for path in packed():
            name = f"hpcddp/{path.relative_to(PACKAGE)}"
            archive.writestr(name, path.read_bytes())
            if code := compiled(path):
                archive.writestr(f"{name}c", code)
    return buffer.getvalue()


def packed() -> list[Path]:
    """The files of the modules, found by reading their imports."""
    left, files = [FIRST], set[Path]()
    while left:
        path = left.pop()
        if path not in files:
            files.add(path)
            left += _imported(path)
    rooms = {path.parent for path in files}
    return sorted(files | {room / "__init__.py" for room in rooms})


def _imported(path: Path) -> Iterator[Path]:
    """The modules of ours that a module imports."""
    for inner, package, many, one in _IMPORT.findall(path.read_text(encoding="utf-8")):
        if inner and path.parent == PACKAGE:
            continue
        folder = PACKAGE.joinpath(*package.split(".")[1:])
        named = (folder / f"{name}.py" for name in re.findall(r"\w+", many or one))
        yield from (path for path in (folder.with_suffix(".py"), *named) if path.is_file())


def compiled(source: Path) -> bytes:
    """This Python's bytecode of a module, if it is fresh, marked so that Python does not compare it
    with the source (PEP 552); another Python takes the source."""
    kept = Path(importlib.util.cache_from_source(str(source)))
    try:
        data, facts = kept.read_bytes(), source.stat()
    except OSError:
        return b""
    fresh = (0).to_bytes(4, "little")
    fresh += (int(facts.st_mtime) & 0xFFFFFFFF).to_bytes(4, "little")
    fresh += (facts.st_size & 0xFFFFFFFF).to_bytes(4, "little")
    if data[:16] != importlib.util.MAGIC_NUMBER + fresh:
        return b""
    return importlib.util.MAGIC_NUMBER + UNCHECKED + bytes(8) + data[16:]
