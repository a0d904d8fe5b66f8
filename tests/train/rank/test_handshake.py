"""The ranks' meeting: who may train, and what is told when a rank is wrong, doubled or missing."""

import json
import socket
import threading

import pytest
from ranks import Ranks, make_run
from torch.distributed import HashStore

from hpcddp import topology
from hpcddp.attempt import error_record
from hpcddp.errors import RankMapError
from hpcddp.rundir import RunDir
from hpcddp.topology import Rank
from hpcddp.train.rank import handshake

ALIKE = {"device": "cpu", "sees": 0, "given": 0, "broken": False}


def meeting(reports, *, size=None, timeout=20.0):
    """What each of several ranks, as threads on one store, got out of `meet`."""
    size = size or len(reports)
    store, ends = HashStore(), [None] * len(reports)

    def come(i, number, uuid, more=None):
        rank = Rank(number, size, number, size, 0)
        report = {"rank": number, "host": f"n{i}", "pid": 100 + i, "uuid": uuid, **ALIKE}
        try:
            ends[i] = handshake.meet(store, rank, report | (more or {}), timeout)
        except RankMapError as error:
            handshake.refuse(store, error)
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


def test_a_rank_without_its_gpu_ends_all_and_every_one_of_them_blames_its_host(tmp_path):
    """The record of the attempt's failure is of that host, whichever rank writes it."""
    gpu = {"device": "cuda:0", "sees": 4, "given": 4}
    ends = meeting([(0, "a", gpu), (1, "b", gpu), (2, "", {"given": 4}), (3, "d", gpu)])
    assert {str(end).split("\n")[0] for end in ends} == {
        "rank 2 on n2 sees 0 of the 4 GPUs allocated to it"
    }
    for rank, end in enumerate(ends):
        attempt = RunDir(tmp_path / str(rank)).attempt(1)
        attempt.path.mkdir(parents=True)
        assert error_record.report(end, attempt, rank).startswith(
            "rank 2 on n2: rank 2 on n2 sees 0"
        )
        told = json.loads(attempt.error.read_text())
        assert (told["host"], told["rank"], told["kind"], told["bad_host"]) == (
            "n2",
            2,
            "crash",
            True,
        )


def test_missing_ranks_are_named():
    ends = meeting([(0, ""), (4, "")], size=6, timeout=2)
    assert "1-3,5 did not reach the rendezvous within 2 s" in str(ends[0])
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
        with pytest.raises(RankMapError, match="does not fit"):
            topology.check_map(rank, (1, 2), 2)


@pytest.mark.parametrize(
    "numbers, text", [([], ""), ([3], "3"), ([0, 1, 2, 3], "0-3"), ([9, 4, 1, 2, 8], "1-2,4,8-9")]
)
def test_ranges(numbers, text):
    assert handshake.ranges(numbers) == text


def test_a_rank_waits_for_rank_0_to_listen_and_no_longer():
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        address = door.getsockname()
        waiting = threading.Thread(target=handshake.await_listener, args=(address, 60.0))
        waiting.start()
        waiting.join(0.5)
        assert waiting.is_alive()
        door.listen()
        waiting.join(20.0)
        assert not waiting.is_alive()
    handshake.await_listener(address, 0.1)  # returns, although nobody listens
    handshake.await_listener(("no.such.host.invalid", 1), 60.0)  # what the store will say
