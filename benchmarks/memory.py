"""The memory of a node's ranks after the imports of a DDP script.

python memory.py FIGURES    writes the bytes of one node as a list of one number

It is the proportional set size (proc(5), smaps_rollup): a page shared by several processes counts
once.
"""

import json
import os
import re
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.parallel
import torch.utils.data
import torch.utils.data.distributed

NODES = 2


def held(pid: int) -> int:
    """Bytes of a process (PSS)."""
    found = re.search(r"^Pss: +(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.M)
    assert found
    return 1024 * int(found[1])


def main(figures: str) -> None:
    rank, world = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    dist.init_process_group("gloo", rank=rank, world_size=world)
    dist.barrier()  # all ranks have imported, and none has ended
    mine = held(os.getpid())
    if "HPCDDP_FORKED" in os.environ and os.environ["LOCAL_RANK"] == "0":
        mine += held(os.getppid())
    total = torch.tensor(mine)
    dist.all_reduce(total)
    if rank == 0:
        Path(figures).write_text(json.dumps([total.item() / NODES]))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
