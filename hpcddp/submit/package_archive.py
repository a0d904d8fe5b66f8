"""package.pyz: hpcddp for ranks whose Python is not that of hpcddp, as one file on PYTHONPATH.

It holds the modules that run in a rank, in the version that submitted the job, and no other
package: those of the ranks' Python stay as they are. The ranks need Python 3.11 and torch.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

from hpcddp import __version__

PACKAGE = Path(__file__).parents[1]
# The rooms that a rank does not enter.
OUTSIDE = {"cli", "dashboard", "report", "sandbox", "observe", "submit", "compare", "planning",
           "trackers"}  # fmt: skip
# torch finds the hook by the package's metadata.
INFO = f"hpcddp-{__version__}.dist-info"
METADATA = f"Metadata-Version: 2.1\nName: hpcddp\nVersion: {__version__}\n"
ENTRY_POINTS = "[torch.backends]\nhpcddp = hpcddp.gloo:watch_over\n"


def build() -> bytes:
    """The archive, of the installed version."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for path in modules():
            archive.write(path, f"hpcddp/{path.relative_to(PACKAGE)}")
        archive.writestr(f"{INFO}/METADATA", METADATA)
        archive.writestr(f"{INFO}/entry_points.txt", ENTRY_POINTS)
    return buffer.getvalue()


def modules() -> Iterator[Path]:
    """The files of the modules."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.relative_to(PACKAGE).parts[0] not in OUTSIDE:
            yield path
