"""Each rank's device, and the node that has lost its GPUs."""

import pytest

from hpcddp.errors import RankMapError
from hpcddp.topology import Rank
from hpcddp.train.rank import devices


@pytest.mark.parametrize(
    "visible, rank, local, device",
    [
        (0, Rank(1, 2, 1, 2, 0), False, "cpu"),
        (4, Rank(5, 8, 1, 4, 1), False, "cuda:1"),
        (1, Rank(5, 8, 1, 4, 1), False, "cuda:0"),
        (8, Rank(5, 8, 1, 4, 1), True, "cuda:5"),
        (4, Rank(5, 8, 1, 4, 1), True, "cpu"),  # fewer GPUs than ranks on this machine
        (2, Rank(3, 4, 3, 4, 0), False, None),
    ],
)
def test_the_device_follows_from_what_a_rank_sees(visible, rank, local, device):
    if device is None:
        with pytest.raises(RankMapError, match="sees only 2 GPUs"):
            devices.pick(rank, visible, {}, local=local)
    else:
        assert str(devices.pick(rank, visible, {}, local=local)) == device


def test_fewer_gpus_than_slurm_gave_are_a_loss_of_the_node():
    """Fewer than ranks may be what was asked for; error.json names the host in either case."""
    rank = Rank(7, 8, 3, 4, 1)
    with pytest.raises(RankMapError, match="sees only 2 GPUs") as asked:
        devices.pick(rank, 2, {"SLURM_GPUS_ON_NODE": "2"}, local=False)
    with pytest.raises(RankMapError, match="sees 3 of the 4 GPUs allocated to it") as lost:
        devices.pick(rank, 3, {"SLURM_GPUS_ON_NODE": "4"}, local=False)
    assert asked.value.facts["host"] == lost.value.facts["host"] != ""
    assert [error.value.facts.get("bad_host", False) for error in (asked, lost)] == [False, True]


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({}, 0),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, 0),  # not of Slurm's
        ({"SLURM_GPUS_ON_NODE": "4"}, 4),
        ({"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "0, 1,2,3"}, 4),
        ({"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "2"}, 1),  # a task has its own one
        ({"SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}, 2),
        ({"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": ""}, 0),  # a person wants the CPU
        ({"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "-1"}, 0),
        ({"SLURM_GPUS_ON_NODE": "1", "CUDA_VISIBLE_DEVICES": "NoDevFiles"}, 0),
        ({"SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "GPU-1a,GPU-2b"}, 2),
        ({"SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "MIG-1a,MIG-2b"}, 1),
        ({"SLURM_GPUS_ON_NODE": "8", "ROCR_VISIBLE_DEVICES": "3"}, 1),
    ],
)
def test_what_slurm_gave_a_rank(environ, count):
    assert devices.given(environ) == count


def reports(*ranks):
    """Two ranks a node: type of device, GPUs seen and given, and whether the driver is dead."""
    found = []
    for rank, (kind, sees, given, *broken) in enumerate(ranks):
        device = f"cuda:{rank % 2}" if kind == "cuda" else "cpu"
        found.append(
            {"rank": rank, "host": f"n{rank // 2}", "device": device, "uuid": str(rank),
             "sees": sees, "given": given, "broken": bool(broken)}
        )  # fmt: skip
    return found


GPU, GONE, CPU = ("cuda", 2, 2), ("cpu", 0, 2), ("cpu", 0, 0)


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        ([GPU, GPU, GONE, GONE], "rank 2 on n1 sees 0 of the 2 GPUs allocated to it"),
        # Most of them have lost theirs, and still it is they who have.
        ([GPU, GPU, GONE, GONE, GONE, GONE], "rank 2 on n1 sees 0 of the 2"),
        # Where Slurm says nothing, the one that differs from most; of two, the CPU.
        ([("cuda", 2, 0)] * 4 + [CPU, CPU], "rank 4 on n2 uses cpu, but 4 of 6 ranks use"),
        ([CPU] * 4 + [("cuda", 2, 0)] * 2, "rank 4 on n2 uses cuda:0, but 4 of 6 ranks use"),
        ([("cuda", 2, 0)] * 2 + [CPU, CPU], "rank 2 on n1 uses cpu"),
        # One GPU of two is lost, and each rank here needs one.
        ([GPU, GPU, ("cuda", 1, 2), GPU], "rank 2 on n1 sees 1 of the 2"),
        # All of a node that is alone: its driver's library is there, and its hardware.
        ([(*GONE, "broken")] * 2, "rank 0 on n0 sees 0 of the 2"),
    ],
)
def test_a_node_that_lost_its_gpus_is_named(ranks, told):
    with pytest.raises(RankMapError) as caught:
        devices.check_lost(reports(*ranks))
    assert str(caught.value).startswith(told) and caught.value.kind == "crash"
    rank = int(told.split()[1])
    assert caught.value.facts == {"rank": rank, "host": f"n{rank // 2}", "bad_host": True}


@pytest.mark.parametrize(
    "ranks",
    [
        [GPU] * 4,
        [CPU] * 4,
        [GONE] * 4,  # the sandbox claims to have GPUs; nor has a torch for CPUs any
        [("cuda", 4, 8)] * 4,  # the list is too long on all nodes: they do not differ
        [("cuda", 1, 1), ("cuda", 1, 1)],  # one for each task
        [("cuda", 4, 4), ("cuda", 4, 4), ("cuda", 8, 8)],  # nodes of several kinds
    ],
)
def test_nodes_that_have_all_they_were_given_train(ranks):
    devices.check_lost(reports(*ranks))
