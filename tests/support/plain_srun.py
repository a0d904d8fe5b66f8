"""Stands for `srun --no-kill --kill-on-bad-exit=0`: one process per node, which outlives others.

python plain_srun.py NODES COMMAND...
"""

import os
import subprocess
import sys

from hpcddp.processes import die_with_parent
from hpcddp.topology import Rank

count, *command = sys.argv[1:]
tasks = [
    subprocess.Popen(
        command,
        env={**os.environ, **Rank(node, int(count), 0, 1, node).to_env()},
        preexec_fn=die_with_parent,
    )
    for node in range(int(count))
]
sys.exit(max(task.wait() for task in tasks))
