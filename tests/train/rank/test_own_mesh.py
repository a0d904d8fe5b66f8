"""A script that divides its model itself (fully_shard): saved, resumed, and on other ranks."""

import hashlib

from local_runs import Command, until
from own_loops import both, runs, said, start
from sites import SUPPORT, Site

from hpcddp.attempt import ledger
from hpcddp.sandbox import compare
from hpcddp.train.checkpoint import dcp_files

SCRIPT = f"""
import hashlib, os, sys, time
sys.path.insert(0, {str(SUPPORT)!r})
import preempted, torch, hpcddp
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

size = hpcddp.init().size
torch.manual_seed(0)
block = lambda: nn.Sequential(nn.Linear(15, 15), nn.BatchNorm1d(15), nn.ReLU(), nn.Dropout(0.2))
model = nn.Sequential(checkpoint_wrapper(block()), block(), nn.Linear(15, 1))
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")) if size == 4 else None
for part in (*model, model):
    fully_shard(part, mesh=mesh)
torch.manual_seed(dist.get_rank())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.9)
x = torch.randn(96, 15, generator=torch.Generator().manual_seed(1))
dataset = TensorDataset(x, x.sum(1, keepdim=True))
loader = DataLoader(dataset, batch_size=4, sampler=hpcddp.Sampler(dataset))
run = hpcddp.attach(model, optimizer, scheduler=scheduler, save_every=8, keep=9)
whole = [t.full_tensor() for p in model.parameters() if (state := optimizer.state.get(p))
         for t in (p, state["exp_avg"], state["exp_avg_sq"])]
for tensor in whole:
    print("whole", hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest(), flush=True)
for epoch in run.epochs(2):
    for inputs, targets in run.batches(loader):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        run.step(loss)
        print("took", dist.get_rank(), run.steps, loss.item(), flush=True)
        time.sleep(float(sys.argv[1]))
        preempted.after(run)
    with torch.no_grad():  # its parameters are whole when the next save comes
        model(x[:4])
dist.destroy_process_group()
"""


def test_preempted_it_ends_as_if_undisturbed(site: Site, command: Command) -> None:
    site.write("own.py", SCRIPT)
    reference, run = both(site, command, "own.py", at=(9,))
    assert compare.difference(reference, run, 2) == ""


def test_it_goes_on_with_other_ranks_and_another_mesh(site: Site, command: Command) -> None:
    """Of 4 ranks two each hold the same part."""
    site.write("own.py", SCRIPT)
    start(command, "0.1", script="own.py", stop="6")
    until(command, lambda s: s["state"] == "STOPPED")
    assert command("resume", "last", "--gpus", "4", "--follow").code == 0
    (run,) = runs(site)
    before = compare.traces(run)[1][-1]["step"]
    tensors = dcp_files.read_all(run.checkpoints / f"step-{before}").values()
    saved = {f"whole {hashlib.sha256(t.numpy().tobytes()).hexdigest()}" for t in tensors}
    loaded = said(run, "whole")
    assert len(loaded) == 5 * 3 * 2 and set(loaded.values()) == {4} and set(loaded) <= saved
    # Steps of 8 samples, then of 16, in two epochs of 96.
    left = -(-(-8 * before % 96) // 16) + 6 * ((192 - 8 * before) // 96)
    assert compare.digest(run).startswith(f"{before + left}:")


REFUSED = """
import torch, hpcddp
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

rank = hpcddp.init().rank.world_rank
with torch.device("meta"):
    empty = nn.Linear(2, 2)
for model in (
    FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu")),
    fully_shard(empty),
    fully_shard(nn.Linear(2, 2 + rank)),
):
    try:
        hpcddp.attach(model, torch.optim.SGD(model.parameters(), 0.1))
    except hpcddp.errors.UserError as error:
        print("refused", error, flush=True)
dist.destroy_process_group()
"""


def test_a_model_that_no_checkpoint_can_hold_is_refused(site: Site, command: Command) -> None:
    site.write("own.py", REFUSED)
    start(command, script="own.py")
    until(command, lambda s: s["state"] == "COMPLETED")
    (run,) = runs(site)
    assert said(run, "refused") == {
        "refused hpcddp.attach: FullyShardedDataParallel is not supported": 2,
        "refused hpcddp.attach: weight is on the meta device and has no values": 2,
        "refused hpcddp.attach: ranks 0 and 1 have different models": 2,
    }


def test_a_model_that_is_refused_ends_the_run(site: Site, command: Command) -> None:
    """The ranks have met by then; the next attempt would fail in the same way."""
    script = REFUSED.partition("for model")[0] + "hpcddp.attach(empty, None)"
    site.write("own.py", script)
    start(command, script="own.py")
    until(command, lambda s: s["state"] == "FAILED")
    (run,) = runs(site)
    assert [a.cause for a in ledger.attempts(run)] == ["mistake"]
    assert "weight is on the meta device and has no values" in command("why").out
