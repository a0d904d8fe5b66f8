"""Memory of tensors of all forms is copied as a whole."""

import torch

from hpcddp.train.checkpoint.device_steps import shaped, spanned


def test_a_tensor_of_any_form_is_the_same_from_its_memory() -> None:
    numbers = torch.arange(120.0).view(2, 3, 4, 5)
    for tensor in (
        numbers,
        numbers.transpose(0, 3),
        numbers[1, 1:, ::2, 3],
        numbers[1, 2, 3, 4],
        numbers[0, 0, 0, 3:5].expand(3, 2),
        numbers[:0],
        numbers.to(memory_format=torch.channels_last),
        numbers > 50,
        torch.view_as_complex(numbers[..., :2].contiguous()).transpose(0, 1),
    ):
        memory = spanned(tensor).clone()
        assert memory.dim() == 1 and torch.equal(shaped(memory, tensor), tensor)
