"""This rank's share of the model: built, converted, divided, and given to its engine."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import nn

from hpcddp.errors import JobFileError
from hpcddp.spec import JobSpec, TrainSpec
from hpcddp.train.checkpoint import plainfile
from hpcddp.train.checkpoint.snapshot import Live
from hpcddp.train.input import seeding
from hpcddp.train.input.batches import TrainData
from hpcddp.train.parallel import cut, layer_plan, model, optim
from hpcddp.train.parallel.engine import Engine, Plain
from hpcddp.train.parallel.hooks import Hook
from hpcddp.train.rank.spread import Spread
from hpcddp.train.rank.task_module import Task


class Model:
    """A rank's share of the model.

    Args:
        task, spec, spread: the user's task, the job, and the mesh of ranks.
        new: there is no checkpoint to resume from.

    ``module`` has the rank's parameters under their names in the whole model.
    """

    def __init__(self, task: Task, spec: JobSpec, spread: Spread, *, new: bool) -> None:
        self._task, self._spec, self._spread = task, spec, spread
        set_modes(spec.train, spread.world.device)
        seeding.seed_all(spec.seed)  # the same weights on all ranks
        whole: nn.Module = task.model()
        if spec.train.precision == "fp64":
            whole.double()
        if new:
            plainfile.start(whole, spec)
        self.chains: list[cut.Chain] = []  # the stages of a pipeline
        self.module = self._cut(whole)
        seeding.seed_all(seeding.mix(spec.seed, spread.stream))

    def _cut(self, whole: nn.Module) -> nn.Module:
        """The rank's part of the model, on its device."""
        task, spread, train, layout = (
            self._task,
            self._spread,
            self._spec.train,
            self._spread.layout,
        )
        blocks = cut.blocks(task, whole)
        plan = layer_plan.tp_plan(task, whole, layout.tp) if layout.tp > 1 else {}
        module = whole
        if layout.pp > 1:
            module, self.chains = self._stages(whole)
        if plan:
            layer_plan.share_layers(module, plan, spread.mesh["tp"])
        blocks = cut.held(module, blocks)
        if train.recompute:
            cut.recompute(module, blocks)
        if train.compile:
            self._compile(module, blocks)
        if spread.divided and layout.data_size > 1:  # moves blocks to the device, too
            mesh = spread.mesh["fsdp"] if layout.ddp == 1 else spread.mesh["ddp", "fsdp"]
            roots: Sequence[nn.Module] = self.chains or [whole]
            for root in roots:
                cut.shard(root, cut.held(root, blocks), mesh)
        return module.to(spread.world.device)

    def _stages(self, whole: nn.Module) -> tuple[nn.Module, list[cut.Chain]]:
        """A chain of all parts on this rank, and a chain for each stage."""
        from hpcddp.train.parallel.pipeline import stages_of

        ranks, stage_rank = self._spread.layout.pp, self._spread.place.pp
        stages = cut.stages(self._task, whole, stages_of(self._spec, ranks))[stage_rank::ranks]
        names = [name for stage in stages for name in stage]
        return cut.Chain(whole, names), [cut.Chain(whole, stage) for stage in stages]

    def _compile(self, module: nn.Module, blocks: list[str]) -> None:
        """Compile the whole model if nothing hooks into its parts, else block by block."""
        if self._spread.layout.plain:
            module.compile()
        for name in [] if self._spread.layout.plain else blocks:
            module.get_submodule(name).compile()

    def live(self, hook: Hook, total_steps: int) -> Live:
        """The objects that a checkpoint saves and loads: model, optimizer and schedule."""
        task, spread, train = self._task, self._spread, self._spec.train
        try:
            optimizer = optim.make_optimizer(task, self.module, train)
        except AttributeError as error:
            if not self.chains:
                raise
            raise JobFileError(
                f"optimizer() uses a layer that is on another rank of the pipeline: {error}",
                where=task.name,
                hint="use only what model.named_parameters() has on this rank",
            ) from None
        if spread.layout.zero:
            optimizer = optim.divided(optimizer, spread.group("ddp"))
        scheduler = optim.make_scheduler(task, optimizer, train, total_steps)
        if spread.divided:
            optim.split_groups(optimizer, scheduler)
        return Live(
            self.module, optimizer, scheduler, model.grad_scaler(spread, self._spec), hook=hook
        )

    def engine(self, data: TrainData, hook: Hook) -> Engine:
        """The engine that runs the model; made after the checkpoint is loaded. A collective."""
        if not self.chains:
            return Plain(self.module, self._task, self._spec, self._spread, data, hook)
        from hpcddp.train.parallel.pipeline import Pipeline

        return Pipeline(self.chains, self._task, self._spec, self._spread, data)


def set_modes(train: TrainSpec, device: torch.device) -> None:
    """Set the precision of matrix products, and determinism."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if train.tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = train.tf32
    if train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS, Reproducibility
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True)
