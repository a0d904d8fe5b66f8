"""Steps and their micro-batches: which samples of a share go through the model together."""

import pytest
import torch
from torch.distributed import HashStore

from hpcddp.errors import JobFileError
from hpcddp.spec import JobSpec, TrainSpec
from hpcddp.topology import Rank
from hpcddp.train.input.batches import Micro, TrainData, split
from hpcddp.train.rank.spread import replicas
from hpcddp.train.rank.world import World


@pytest.mark.parametrize(
    "job, world, message",
    [
        ({"global_batch": 8}, 3, "does not divide over 3 ranks"),
        ({"global_batch": 40}, 2, "37 samples, fewer than one global batch of 40"),
        ({"global_batch": 40, "train": TrainSpec(drop_last=False)}, 40, "fewer than 40 ranks"),
    ],
)
def test_data_that_makes_no_step_is_refused(job, world, message):
    spec = JobSpec(task="small.py", **job)
    place = Rank(0, world, 0, 1, 0)
    with pytest.raises(JobFileError, match=message):
        ranks = World(place, torch.device("cpu"), "gloo", [], HashStore())
        TrainData(range(37), spec, replicas(ranks))


@pytest.mark.parametrize(
    "share, limit, expected", [(12, 0, 1), (12, 12, 1), (12, 5, 3), (12, 1, 12), (7, 3, 7)]
)
def test_accumulation_is_the_fewest_equal_micro_batches(share, limit, expected):
    assert split(share, limit) == expected


@pytest.mark.parametrize(
    "share, limit, least, multiple, expected",
    [(12, 0, 4, 1, 4), (12, 2, 4, 1, 6), (10, 0, 4, 1, 5), (3, 0, 4, 1, 3), (12, 0, 4, 4, 4),
     (24, 5, 4, 4, 8), (12, 1, 2, 2, 12)],
)  # fmt: skip
def test_a_pipeline_has_a_micro_batch_for_each_stage(share, limit, least, multiple, expected):
    assert split(share, limit, least, multiple) == expected


def test_a_share_that_makes_no_rounds_is_refused():
    with pytest.raises(JobFileError, match="the 5 samples of a rank into a multiple of 2"):
        split(5, 0, 2, 2)


@pytest.mark.parametrize("left", range(1, 13))
def test_the_last_steps_shapes_add_up(left):
    """Micro-batches of all ranks: as many, of the same sizes, with all samples and no other."""
    spec = JobSpec(global_batch=12, train=TrainSpec(drop_last=False, micro_batch=2))
    steps = []
    for rank in range(3):
        world = World(Rank(rank, 3, rank, 3, 0), torch.device("cpu"), "gloo", [], HashStore())
        steps.append(TrainData(range(24 + left), spec, replicas(world)).step_at(24))
    assert {step.samples for step in steps} == {left}
    assert len({tuple(micro.size for micro in step.micros) for step in steps}) == 1
    assert sum(micro.real for step in steps for micro in step.micros) == left
    assert all(isinstance(m, Micro) and 0 <= m.real <= m.size for s in steps for m in s.micros)
