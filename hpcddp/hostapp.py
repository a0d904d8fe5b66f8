"""host.pyz: the modules that begin and end an attempt, as one file that any Python can run.

It lies in the run dir, so the decision needs neither the environment nor the package, which may be
upgraded or removed while the job waits. A host's own Python may be older: 3.9 is enough.
"""

from __future__ import annotations

import importlib.util
import io
import zipfile
from pathlib import Path

MODULES = (
    "claim",
    "codes",
    "comeback",
    "errors",
    "failure",
    "host",
    "hostlist",
    "ledger",
    "meeting",
    "reason",
    "record",
    "requeue",
    "rundir",
    "sentry",
    "site",
    "slurm",
    "standing",
)
UNCHECKED = (1).to_bytes(4, "little")
MAIN = "from hpcddp.host import run\n\nrun()\n"


def build() -> bytes:
    """The archive, of the installed version."""
    package = Path(__file__).parent
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("__main__.py", MAIN)
        for name in ("__init__", *MODULES):
            source = package / f"{name}.py"
            archive.writestr(f"hpcddp/{name}.py", source.read_bytes())
            if code := compiled(source):
                archive.writestr(f"hpcddp/{name}.pyc", code)
    return buffer.getvalue()


def compiled(source: Path) -> bytes:
    """What this Python keeps of a module, if that is fresh, marked as not to be compared with its
    source (PEP 552); another Python takes the source."""
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
