"""Stands for `srun --no-kill --kill-on-bad-exit=0`: one process per node, which outlives others.

python plain_srun.py --nodes=NODES COMMAND...

All nodes have one name. With --nodelist, it stands for an srun on one node, which has returned.
PLAIN_SRUN has a JSON object: what a node, by its number, starts instead.
"""

import json
import os
import subprocess
import sys

from hpcddp.processes import die_with_parent
from hpcddp.topology import Rank

words = [word for word in sys.argv[1:] if not word.startswith("--nodelist=")]
count, command = words[0].removeprefix("--nodes="), words[1:]
others = json.loads(os.environ.get("PLAIN_SRUN", "{}"))
tasks = [
    subprocess.Popen(
        others.get(str(node), command),
        env={**os.environ, **Rank(node, int(count), 0, 1, node).to_env()},
        preexec_fn=die_with_parent,
    )
    for node in range(int(count))
]
for node in map(int, others):
    if code := tasks[node].wait():
        print(f"srun: error: n{node}: task {node}: Exited with exit code {code}", flush=True)
sys.exit(max(task.wait() for task in tasks))
