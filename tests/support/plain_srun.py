"""Stands for `srun --no-kill --kill-on-bad-exit=0`: one process per node, which outlives others.

python plain_srun.py --nodes=NODES COMMAND...

All nodes have one name. With --nodelist, it stands for an srun on one node, which has returned.
"""

import os
import subprocess
import sys

from hpcddp.processes import die_with_parent
from hpcddp.topology import Rank

words = [word for word in sys.argv[1:] if not word.startswith("--nodelist=")]
count, command = words[0].removeprefix("--nodes="), words[1:]
tasks = [
    subprocess.Popen(
        command,
        env={**os.environ, **Rank(node, int(count), 0, 1, node).to_env()},
        preexec_fn=die_with_parent,
    )
    for node in range(int(count))
]
sys.exit(max(task.wait() for task in tasks))
