"""Communication hooks of DDP (``ddp.hook``), which send gradients bucket by bucket.

    fp16, bf16   send gradients in half the bytes
    powersgd     after ``ddp.after`` steps, send a matrix as two thin ones, of ``ddp.rank`` columns;
                 the remainder is added to the next gradient (Vogels et al., 2019)
    local_sgd    after ``ddp.after`` steps, send gradients within a node only; every ``ddp.period``
                 steps all ranks average their weights (post-local SGD, Lin et al., 2020)

PowerSGD's memory is training state of each rank, as large as the gradients. A checkpoint has it as
``hook.<rank>.<bucket>.<what>``, so a resume is exact to the last bit. With another number of ranks,
``ddp.rank`` or bucket size, the memory starts empty.

With local_sgd the nodes have different weights. Before each evaluation and each save, all ranks
average weights and optimizer state, and continue from there: one model is evaluated and saved, and
a resumed run continues like the run that saved. So a save at another step changes the training.
"""
# No deferred annotations here: DDP reads the annotations of its hooks.

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hpcddp.errors import JobFileError
from hpcddp.spec import JobSpec
from hpcddp.train.parallel import state_dict
from hpcddp.train.rank.spread import Spread

PREFIX = "hook"
# PowerSGD's attributes by name in a checkpoint; each maps a bucket to a tensor.
MEMORIES = {"error": "error_dict", "p": "p_memory_dict", "q": "q_memory_dict"}
TINY = 1e-12  # added to a column's norm, which may be 0


def half(state: torch.dtype, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average in a shorter type. torch's own hook for bfloat16 supports only NCCL."""
    buffer = bucket.buffer()
    short = buffer.div_(dist.get_world_size()).to(state)
    sent: torch.futures.Future[Any] = dist.all_reduce(short, async_op=True).get_future()
    return sent.then(lambda done: buffer.copy_(done.value()[0]))


def _half(dtype: torch.dtype) -> Callable[[JobSpec, Spread], tuple[Any, Any]]:
    return lambda spec, spread: (dtype, half)


def _powersgd(spec: JobSpec, spread: Spread) -> tuple[Any, Any]:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

    if spread.world.device.type == "cpu" and torch.cuda.is_available():
        raise JobFileError(
            "powersgd does not work for ranks on the CPU where a GPU is visible",
            where="ddp.hook",
            hint='use as many ranks as GPUs, or set CUDA_VISIBLE_DEVICES = "" in [env]',
        )
    memory = powersgd.PowerSGDState(
        process_group=None,
        matrix_approximation_rank=spec.ddp.rank,
        start_powerSGD_iter=spec.ddp.after,
        orthogonalization_epsilon=TINY,
        random_seed=spec.seed % 2**32,
    )
    return memory, powersgd.powerSGD_hook


def _local_sgd(spec: JobSpec, spread: Spread) -> tuple[Any, Any]:
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local_sgd

    node, _ = dist.new_subgroups(spread.world.rank.local_size)
    return local_sgd.PostLocalSGDState(None, node, spec.ddp.after), local_sgd.post_localSGD_hook


# Each returns the hook's state and the hook; collectives.
HOOKS: dict[str, Callable[[JobSpec, Spread], tuple[Any, Any]]] = {
    "none": lambda spec, spread: (None, None),
    "fp16": _half(torch.float16),
    "bf16": _half(torch.bfloat16),
    "powersgd": _powersgd,
    "local_sgd": _local_sgd,
}


class Hook:
    """A rank's hook and its state; made by all ranks together.

    Raises:
        JobFileError: on all ranks, if the hook does not work there.
    """

    def __init__(self, spec: JobSpec, spread: Spread) -> None:
        world, self._ddp = spread.world, spec.ddp
        self._rank, self._device = world.rank.world_rank, world.device
        self._name = spec.ddp.hook if world.size > 1 else "none"
        self._state, self._hook = HOOKS[self._name](spec, spread)
        self._local = self._name == "local_sgd" and world.rank.local_size < world.size
        self._apart = False  # whether ranks have different weights or optimizer states
        # The keys that a saved memory must match, as plain data; None for a hook without memory.
        self.fits: list[Any] | None = None
        if self._name == "powersgd":
            ddp, precision = spec.ddp, spec.train.precision
            facts = (ddp.rank, ddp.bucket_mb, ddp.find_unused_parameters, precision)
            self.fits = [self._name, world.size, *facts]

    def register(self, model: DistributedDataParallel) -> None:
        """Use the hook from the next backward pass on.

        Raises:
            JobFileError: a layer has sparse gradients, which are in no bucket.
        """
        if self._hook is None:
            return
        check_dense(model.module, "ddp.hook")
        model.register_comm_hook(self._state, self._hook)

    @property
    def alike(self) -> bool:
        """Whether all ranks always have the same model and optimizer state, and no memory."""
        return not self._local and self.fits is None

    def begin(self, step: int) -> None:
        """Note the start of a step, after ``step`` steps."""
        if hasattr(self._state, "iter"):  # the hook counts backward passes; a step may have several
            self._state.iter = step

    def end(self, step: int, module: nn.Module) -> None:
        """Note the end of step number ``step``; a collective."""
        local = step - self._ddp.after
        if not self._local or local <= 0:
            return
        self._apart = True
        if local % self._ddp.period == 0:
            _average(p for p in module.parameters() if p.requires_grad)

    def level(self, module: nn.Module, optimizer: Optimizer) -> None:
        """Give all ranks the same model and optimizer state; a collective."""
        if self._apart:
            tensors = state_dict.parts(module, optimizer).stepped.values()
            _average(t for t in tensors if t.is_floating_point() and t.device == self._device)
        self._apart = False

    def memory(self) -> dict[str, Tensor]:
        """This rank's memory, by name in a checkpoint."""
        return {
            f"{PREFIX}.{self._rank}.{bucket}.{what}": tensor
            for what, name in MEMORIES.items()
            for bucket, tensor in getattr(self._state, name, {}).items()
            if tensor.numel()  # a bucket of vectors only has no thin matrices
        }

    def remember(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the memory by a result of ``memory``."""
        self._apart = False
        self.forget()
        for full, tensor in tensors.items():
            _, _, bucket, what = full.split(".")
            getattr(self._state, MEMORIES[what])[int(bucket)] = tensor.to(self._device)

    def forget(self) -> None:
        """Clear the memory, after a skipped step with bad numbers."""
        for name in MEMORIES.values():
            getattr(self._state, name, {}).clear()


def check_dense(module: nn.Module, key: str) -> None:
    """Refuse a model with sparse gradients.

    Raises:
        JobFileError: a layer has sparse gradients.
    """
    for name, part in module.named_modules():
        if getattr(part, "sparse", False):
            raise JobFileError(
                f"does not support the sparse gradient of {name or type(part).__name__}",
                where=key,
                hint=f"remove {key}, or make the layer with sparse=False",
            )


@torch.no_grad()
def _average(tensors: Iterable[Tensor]) -> None:
    """Average the tensors over all ranks, in place; needs the same memory again."""
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(tensor.dtype, []).append(tensor)
    for some in kinds.values():
        flat = torch.cat([t.reshape(-1) for t in some]).div_(dist.get_world_size())
        dist.all_reduce(flat)
        for tensor, mean in zip(some, flat.split([t.numel() for t in some]), strict=True):
            tensor.copy_(mean.view_as(tensor))
