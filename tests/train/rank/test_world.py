"""The process group and those beside it: how long a rank may be silent in them."""

import pytest
from ranks import CALM, Ranks, make_run

SHORT = """
from datetime import timedelta
from torch.distributed import distributed_c10d
distributed_c10d.default_pg_timeout = timedelta(seconds=2)
"""

# Rank 1 keeps the others waiting for longer than that; the time-outs of all groups are told.
SILENT = """
import os, time
from torch.distributed import distributed_c10d
_loss, steps = loss, []
def loss(output, target):
    steps.append(1)
    if os.environ["RANK"] == "1" and len(steps) == 3:
        time.sleep(4)
    if len(steps) == 4:
        groups = [g for g in distributed_c10d._world.pg_map if g.size() > 0]
        found = {g._get_backend(torch.device("cpu")).options._timeout for g in groups}
        print(len(groups), "groups:", *sorted(f"{t.total_seconds():.0f} s" for t in found))
    return _loss(output, target)
"""


def train(tmp_path, **options):
    """Exit codes, output and errors of two ranks, one of which is silent for a while."""
    keys = {"extra": SILENT, "gpus": 2, "max_steps": 6, "checkpoint__every": 2, **CALM, **options}
    with Ranks.of(make_run(tmp_path, **keys), 2, first=SHORT) as ranks:
        ends = ranks.wait()
    return [end[0] for end in ends], ends[0][1], "".join(end[2] for end in ends)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_where_a_watchdog_watches_no_group_has_a_time_out_below_its_patience(tmp_path, strategy):
    codes, out, err = train(tmp_path, strategy=strategy)
    assert (codes, err) == ([0, 0], "")
    (line,) = (line for line in out.splitlines() if " groups: " in line)
    count, _, limits = line.partition(" groups: ")
    assert int(count) >= (3 if strategy == "ddp" else 4)  # the mesh has some of its own
    assert limits == f"{24 * 86400} s"


def test_without_a_watchdog_torchs_own_time_outs_stay(tmp_path):
    codes, out, err = train(tmp_path, train__hang_seconds=0)
    assert 1 in codes and "imed out" in err and " groups: " not in out
