"""How gradients travel under DDP (``ddp.hook``), bucket by bucket.

    fp16, bf16   they travel in half the bytes
    powersgd     after ``ddp.after`` steps a matrix travels as two thin ones, of ``ddp.rank``
                 columns; the remainder is added to the next gradient (Vogels et al., 2019)
    local_sgd    after ``ddp.after`` steps they travel within a node only, and every ``ddp.period``
                 steps all ranks average their weights (post-local SGD, Lin et al., 2020)

PowerSGD's memory is training state, of each rank its own, and as large as the gradients. A save has
it as ``hook.<rank>.<bucket>.<what>``; a resume goes on to the last bit. On another number of ranks,
or with another rank or size of buckets, it starts afresh.

Under local_sgd the nodes' weights differ. Before each evaluation and each save all ranks average
weights and optimizer state, and go on from there: one model is evaluated and saved, and a resume
goes on as the run that saved did. So a save at another step changes the training.
"""
# No deferred annotations here: DDP wants to see those of its hooks.

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
# PowerSGD's, by their content: numbers by bucket.
MEMORIES = {"error": "error_dict", "p": "p_memory_dict", "q": "q_memory_dict"}
TINY = 1e-12  # added to the norm of a column, which may be 0


def half(state: torch.dtype, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average in a type of fewer bits. torch's own for bfloat16 is for NCCL only."""
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
            "powersgd waits for the GPU where it sees one, and the ranks are on the CPU",
            where="ddp.hook",
            hint="take as many ranks as GPUs, or set CUDA_VISIBLE_DEVICES to nothing in [env]",
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


# Each gives the hook's state and the hook; collectives.
HOOKS: dict[str, Callable[[JobSpec, Spread], tuple[Any, Any]]] = {
    "none": lambda spec, spread: (None, None),
    "fp16": _half(torch.float16),
    "bf16": _half(torch.bfloat16),
    "powersgd": _powersgd,
    "local_sgd": _local_sgd,
}


class Hook:
    """A rank's hook, and what belongs to it outside of DDP; made by all ranks together.

    Raises:
        JobFileError: on all ranks, where it cannot work.
    """

    def __init__(self, spec: JobSpec, spread: Spread) -> None:
        world, self._ddp = spread.world, spec.ddp
        self._rank, self._device = world.rank.world_rank, world.device
        self._name = spec.ddp.hook if world.size > 1 else "none"
        self._state, self._hook = HOOKS[self._name](spec, spread)
        self._local = self._name == "local_sgd" and world.rank.local_size < world.size
        self._apart = False  # whether ranks have different weights or optimizer states
        # The job's settings that a memory fits to, as plain data; None for a hook without memory.
        self.fits: list[Any] | None = None
        if self._name == "powersgd":
            ddp, precision = spec.ddp, spec.train.precision
            facts = (ddp.rank, ddp.bucket_mb, ddp.find_unused_parameters, precision)
            self.fits = [self._name, world.size, *facts]

    def register(self, model: DistributedDataParallel) -> None:
        """Let it have the buckets from the next backward pass on.

        Raises:
            JobFileError: a layer gives sparse gradients, which lie in no bucket.
        """
        if self._hook is None:
            return
        check_dense(model.module, "ddp.hook")
        model.register_comm_hook(self._state, self._hook)

    def begin(self, step: int) -> None:
        """A step begins, after so many."""
        if hasattr(self._state, "iter"):  # counted by DDP's passes, of which a step may have more
            self._state.iter = step

    def end(self, step: int, module: nn.Module) -> None:
        """So many steps are taken; a collective."""
        local = step - self._ddp.after
        if not self._local or local <= 0:
            return
        self._apart = True
        if local % self._ddp.period == 0:
            _average(p for p in module.parameters() if p.requires_grad)

    def level(self, module: nn.Module, optimizer: Optimizer) -> None:
        """Let all ranks have one model, and one optimizer state; a collective."""
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
            if tensor.numel()  # a bucket of vectors alone has no thin matrices
        }

    def remember(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what ``memory`` gave, and nothing else."""
        self._apart = False
        self.forget()
        for full, tensor in tensors.items():
            _, _, bucket, what = full.split(".")
            getattr(self._state, MEMORIES[what])[int(bucket)] = tensor.to(self._device)

    def forget(self) -> None:
        """Begin afresh: a step with bad numbers was left out."""
        for name in MEMORIES.values():
            getattr(self._state, name, {}).clear()


def check_dense(module: nn.Module, key: str) -> None:
    """Refuse a model with layers of sparse gradients.

    Raises:
        JobFileError: it has one.
    """
    for name, part in module.named_modules():
        if getattr(part, "sparse", False):
            raise JobFileError(
                f"the gradient of {name or type(part).__name__} is sparse",
                where=key,
                hint=f"leave {key} out, or make the layer with sparse=False",
            )


@torch.no_grad()
def _average(tensors: Iterable[Tensor]) -> None:
    """Give all ranks the means over all ranks; takes as much memory again."""
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(tensor.dtype, []).append(tensor)
    for some in kinds.values():
        flat = torch.cat([t.reshape(-1) for t in some]).div_(dist.get_world_size())
        dist.all_reduce(flat)
        for tensor, mean in zip(some, flat.split([t.numel() for t in some]), strict=True):
            tensor.copy_(mean.view_as(tensor))
