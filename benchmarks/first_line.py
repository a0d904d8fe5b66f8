"""python first_line.py PATH: each rank writes the time of its first line to PATH.RANK."""

import time

NOW = time.time()

import os  # noqa: E402
import sys  # noqa: E402

with open(f"{sys.argv[1]}.{os.environ['SLURM_PROCID']}", "w") as file:
    file.write(str(NOW))
