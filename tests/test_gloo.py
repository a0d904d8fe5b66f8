"""Python must not end under gloo's threads."""

import os
import subprocess
import sys
from pathlib import Path

# Leaves gloo with work in hand, whose tensors only gloo holds any more.
SCRIPT = """
import torch
import torch.distributed as dist
{}
for _ in range(30):
    much = torch.ones(1_000_000)
    dist.all_gather([torch.empty_like(much)], much, async_op=True)
"""
START = 'dist.init_process_group("gloo")'
ATTACH = """
import hpcddp
model = torch.nn.Linear(2, 2)
hpcddp.attach(model, torch.optim.SGD(model.parameters(), 0.1))
"""
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def run(begin: str, **environ: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(begin)],
        env=os.environ | ALONE | environ, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return done.returncode, done.stderr


def test_a_jobs_script_may_leave_gloo_at_work(tmp_path: Path) -> None:
    assert run(START, HPCDDP_RUN_DIR=str(tmp_path)) == (0, "")


def test_so_may_an_attached_loop_outside_of_a_job() -> None:
    code, said = run(START + ATTACH)
    assert code == 0, said
