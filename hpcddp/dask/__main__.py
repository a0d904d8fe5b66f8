"""Run a program for a job's Dask cluster once: python -m hpcddp.dask PROGRAM.py ARGUMENTS...

Rank 0 runs it. The other ranks end at once; their Dask workers stay until rank 0 has ended.
"""

from __future__ import annotations

import os
import sys

from hpcddp.errors import UserError
from hpcddp.launch.script import Script


def main(args: list[str]) -> None:
    """Run the program, if this is rank 0."""
    try:
        script = Script([sys.executable, *args])
    except UserError:
        sys.exit("usage: python -m hpcddp.dask PROGRAM.py ARGUMENTS...")
    if os.environ.get("RANK", "0") == "0":
        script.run()


if __name__ == "__main__":
    main(sys.argv[1:])
