"""File descriptors for connections to all other ranks."""

import json
import time

from ranks import Ranks, make_run

from hpcddp.attempt import error_record
from hpcddp.topology import Rank
from hpcddp.train.rank import descriptors

COUNTS = """
import collections, os, resource
def _counted():
    kinds = collections.Counter()
    for fd in os.listdir("/proc/self/fd"):
        try:
            kinds[os.readlink(f"/proc/self/fd/{fd}").partition(":")[0]] += 1
        except OSError:
            pass
    return kinds["socket"]
print("sockets:", _counted(), "limit:", resource.getrlimit(resource.RLIMIT_NOFILE), flush=True)
"""


def told(out: str) -> tuple[int, str]:
    """How many sockets a rank had before its model was made, and its limits."""
    (line,) = (line for line in out.splitlines() if line.startswith("sockets: "))
    _, count, _, limits = line.split(maxsplit=3)
    return int(count), limits


def test_a_rank_opens_its_connections_at_the_start_and_as_many_as_are_counted(tmp_path):
    """Those of saves too: they are there before anything is saved."""
    run, size = make_run(tmp_path, extra=COUNTS, gpus=3, global_batch=3, max_steps=1), 3
    with Ranks.of(run, size) as ranks:
        ends = ranks.wait()
    assert [code for code, _, _ in ends] == [0] * size
    for rank, (_, out, _) in enumerate(ends):
        most = descriptors.needed(Rank(rank, size, rank, size, 0), 3) - descriptors.MARGIN
        assert 3 * size < told(out)[0] <= most


def test_a_soft_limit_that_is_too_low_is_raised(tmp_path):
    run = make_run(tmp_path, extra=COUNTS, gpus=2, max_steps=2)
    with Ranks.of(run, 2, files=(24, 4096)) as ranks:
        ends = ranks.wait()
    assert [(code, told(out)[1]) for code, out, _ in ends] == [(0, "(4096, 4096)")] * 2


def test_a_hard_limit_that_is_too_low_is_said_before_anything_connects(tmp_path):
    run, began = make_run(tmp_path, gpus=2), time.monotonic()
    with Ranks.of(run, 2, files=(64, 100)) as ranks:
        ends = ranks.wait()
    assert time.monotonic() - began < 30
    need = descriptors.needed(Rank(0, 2, 0, 2, 0), 3)  # the rank that needs most
    for code, _, err in ends:
        assert code == 1 and "Traceback" not in err
        assert f"2 ranks need {need} file descriptors" in err or "failed first" in err
    error = json.loads(run.attempt(1).error.read_text())
    assert "the hard limit is 100" in error["message"] and "LimitNOFILE" in error["message"]
    assert error["kind"] == "mistake"  # it would be the same again
    assert error_record.is_shared(run.attempt(1))


def test_a_thousand_ranks_pass_the_usual_limit():
    """The first one hosts the store besides."""
    first, other = (descriptors.needed(Rank(rank, 500, 0, 4, 0), 3) for rank in (0, 4))
    assert 1024 < 1500 < other < first < 4096
