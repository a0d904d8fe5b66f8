"""host.pyz: the modules that begin and end an attempt, as one file that any Python can run.

It is in the run folder, so the decision after an attempt needs neither the job's environment nor
the package, which may be upgraded or removed while the job waits. A host's Python may be older: 3.9
is enough.
"""

from __future__ import annotations

import importlib.util
import io
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
FIRST = "attempt/host"
# An import from hpcddp, also inside a function, except in functions of the root's modules.
_IMPORT = re.compile(rb"from hpcddp([\w.]*) import (?:\(([^)]+)\)|(.+))")
_NAME = re.compile(rb"\w+")
UNCHECKED = (1).to_bytes(4, "little")
MAIN = "from hpcddp.attempt.host import run\n\nrun()\n"


def build() -> bytes:
    """The archive, of the installed version."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("__main__.py", MAIN)
        for name, source in sorted(_sources().items()):
            archive.writestr(f"hpcddp/{name}.py", source)
            if code := compiled(PACKAGE / f"{name}.py"):
                archive.writestr(f"hpcddp/{name}.pyc", code)
    return buffer.getvalue()


def packed() -> list[Path]:
    """The files of the modules."""
    return sorted(PACKAGE / f"{name}.py" for name in _sources())


def _sources() -> dict[str, bytes]:
    """The modules by their path in the package, found by following the imports."""
    left, sources = [FIRST], dict[str, bytes]()
    missing = set[str]()  # imported names that are not modules
    while left:
        name = left.pop()
        if name in sources or name in missing:
            continue
        try:
            with open(f"{PACKAGE}/{name}.py", "rb") as file:
                sources[name] = file.read()
        except (FileNotFoundError, NotADirectoryError):
            missing.add(name)
            continue
        left += [f"{name.rpartition('/')[0]}/__init__".lstrip("/"), *_imported(name, sources[name])]
    return sources


def _imported(name: str, source: bytes) -> Iterator[str]:
    """The modules of the package that a module may import."""
    for match in _IMPORT.finditer(source):
        before = source[source.rfind(b"\n", 0, match.start()) + 1 : match.start()]
        if before.strip() or (before and "/" not in name):
            continue
        folder = match[1].decode().replace(".", "/").lstrip("/")
        yield folder or "__init__"
        for imported in _NAME.findall(match[2] or match[3]):
            yield f"{folder}/{imported.decode()}".lstrip("/")


def compiled(source: Path) -> bytes:
    """This Python's bytecode of a module, if it matches the source, marked so that Python does not
    compare them again (PEP 552); another Python uses the source."""
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
