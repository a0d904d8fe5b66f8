"""What a forward pass leaves for the backward pass, counted by hand."""

import torch
from torch import nn

from hpcddp.train.activation_sizes import Watch

BYTES = 4


def passed(module, parts, **more):
    watch = Watch(module, parts, **more)
    with watch.watching():
        module(torch.zeros(3, 8))
    return watch


def test_each_piece_of_memory_counts_once_and_parameters_never():
    """A linear layer keeps what came in (and its weight), a ReLU what it gives."""
    module = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    watch = passed(module, ["0", "1", "2"])
    assert watch.saved == [3 * 8 * BYTES, 3 * 4 * BYTES, 0]
    assert watch.passed == [3 * 4 * BYTES, 3 * 4 * BYTES, 3 * 2 * BYTES]
    assert watch.inner == 0


def test_of_a_block_that_is_computed_again_what_goes_in_is_kept():
    block = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Tanh())
    watch = passed(nn.Sequential(block, nn.Linear(8, 2)), ["0", "1"], blocks=["0"])
    assert watch.saved == [3 * 8 * BYTES, 0]  # the last layer's input is the tanh's output
    assert watch.inner == 3 * 16 * BYTES + 3 * 8 * BYTES
