"""The ranks' meeting: who may train, and what is told when a rank is wrong, doubled or missing."""

import threading

import pytest
from ranks import Ranks, make_run
from torch.distributed import HashStore

from hpcddp import topology
from hpcddp.errors import RankMapError
from hpcddp.topology import Rank
from hpcddp.train import world


def meeting(reports, *, size=None, timeout=20.0):
    """What each of several ranks, as threads on one store, got out of `meet`."""
    size = size or len(reports)
    store, ends = HashStore(), [None] * len(reports)

    def come(i, number, uuid):
        rank = Rank(number, size, number, size, 0)
        report = {"rank": number, "host": f"n{i}", "pid": 100 + i, "uuid": uuid}
        try:
            ends[i] = world.meet(store, rank, report, timeout)
        except RankMapError as error:
            world.refuse(store, error)
            ends[i] = error

    threads = [threading.Thread(target=come, args=(i, *r)) for i, r in enumerate(reports)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ends


def test_every_rank_gets_the_whole_map_in_order():
    ends = meeting([(2, "GPU-c"), (0, "GPU-a"), (1, "GPU-b")])
    assert all([r["rank"] for r in end] == [0, 1, 2] for end in ends)
    assert all([r["host"] for r in end] == ["n1", "n2", "n0"] for end in ends)


def test_ranks_without_gpus_share_nothing():
    assert len(meeting([(0, ""), (1, "")])[0]) == 2


def test_two_processes_with_one_rank_stop_all_of_them():
    ends = meeting([(0, ""), (1, ""), (1, "")], size=3)
    assert all(isinstance(end, RankMapError) for end in ends)
    assert {end.what.split(";")[0] for end in ends} == {"two processes are rank 1"}
    assert ends[0].what.endswith(("on n1, process 101", "on n2, process 102"))


def test_two_ranks_on_one_gpu_are_refused_by_all():
    ends = meeting([(0, "GPU-a"), (1, "GPU-b"), (2, "GPU-a")])
    assert {str(end).split("\n")[0] for end in ends} == {
        "rank 2 on n2: ranks 0 and 2 share one GPU, GPU-a"
    }


def test_missing_ranks_are_named():
    ends = meeting([(0, ""), (4, "")], size=6, timeout=2)
    assert "1-3,5 did not come within 2 s" in str(ends[0])
    assert isinstance(ends[1], RankMapError)


def test_a_rank_in_the_wrong_place_stops_all(tmp_path):
    """As from cyclic distribution on two nodes: rank 1 is on the second node."""
    run = make_run(tmp_path, nodes=(2, 2), gpus=2)
    places = [Rank(0, 4, 0, 2, 0), Rank(1, 4, 0, 2, 1)]
    with Ranks(run, [place.to_env() for place in places]) as ranks:
        (code0, _, err0), (code1, _, err1) = ranks.wait()
    assert (code0, code1) == (1, 1)
    for err in (err0, err1):  # one of them says it, and the other that it did
        assert "rank 1(4)" in err and "expected rank 2 in this place" in err
        assert "Traceback" not in err


@pytest.mark.parametrize("size, allowed", [(2, True), (4, True), (3, False), (6, False)])
def test_slurm_may_give_fewer_nodes_of_a_range_and_no_other_number(size, allowed):
    local = 2 if size % 2 == 0 else 1
    rank = Rank(0, size, 0, local, 0)
    if allowed:
        topology.check_map(rank, (1, 2), 2)
    else:
        with pytest.raises(RankMapError, match="not on the map"):
            topology.check_map(rank, (1, 2), 2)


@pytest.mark.parametrize(
    "numbers, text", [([], ""), ([3], "3"), ([0, 1, 2, 3], "0-3"), ([9, 4, 1, 2, 8], "1-2,4,8-9")]
)
def test_ranges(numbers, text):
    assert world.ranges(numbers) == text


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
            world.pick_device(rank, visible, local=local)
    else:
        assert str(world.pick_device(rank, visible, local=local)) == device
