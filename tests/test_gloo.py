"""Python must not end under gloo's threads."""

import os
import subprocess
import sys

# Says whether gloo is done, when the script ends and when Python does.
SCRIPT = """
import atexit
import torch, torch.distributed as dist
import hpcddp
def tell():
    print(all(work.is_completed() for work in works))
dist.init_process_group("gloo")
model = torch.nn.Linear(2, 2)
atexit.register(tell)
hpcddp.attach(model, torch.optim.SGD(model.parameters(), 0.1))
much = torch.ones(20_000_000)
into = [torch.empty_like(much)]
works = [dist.all_gather(into, much, async_op=True) for _ in range(10)]
tell()
"""


def test_an_attached_loop_ends_when_gloo_has_nothing_in_hand() -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | alone, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ("False\nTrue\n", 0), done.stderr
