"""host.pyz: the modules that begin and end an attempt, as one file that any Python can run.

It lies in the run dir, so the decision needs neither the environment nor the package, which may be
upgraded or removed while the job waits. A host's own Python may be older: 3.9 is enough.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

MODULES = (
    "claim",
    "codes",
    "comeback",
    "errors",
    "host",
    "hostlist",
    "ledger",
    "record",
    "requeue",
    "rundir",
    "site",
    "slurm",
)
MAIN = "import sys\n\nfrom hpcddp.host import main\n\nsys.exit(main(sys.argv[1:]))\n"


def build() -> bytes:
    """The archive, of the installed version."""
    package = Path(__file__).parent
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("__main__.py", MAIN)
        for name in ("__init__", *MODULES):
            archive.writestr(f"hpcddp/{name}.py", (package / f"{name}.py").read_bytes())
    return buffer.getvalue()
