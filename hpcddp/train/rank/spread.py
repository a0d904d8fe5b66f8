"""The mesh of this attempt's ranks, and which ranks hold the same part of a tensor."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from hpcddp import strategy
from hpcddp.spec import JobSpec
from hpcddp.strategy import FACTORS, Layout, MeshPosition
from hpcddp.train.rank.own_mesh import OwnMeshes
from hpcddp.train.rank.world import World


def of(spec: JobSpec, world: World) -> Spread:
    """The spread of a job's strategy over the actual ranks; a collective."""
    rank = world.rank
    return Spread(
        strategy.layout(spec.strategy, rank.world_size // rank.local_size, rank.local_size), world
    )


def replicas(world: World, module: nn.Module | None = None) -> Spread:
    """The spread in which each rank has the whole model; a collective.

    Args:
        module: a script's own model; the script may have divided its parameters over the ranks.

    Raises:
        UserError: on all ranks, if the script divided it in an unsupported way.
    """
    layout = Layout(ddp=world.size)
    if module is None:
        return Spread(layout, world)
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return Spread(layout, world, OwnMeshes(world, tensors))


class Spread:
    """One rank's position in the mesh.

    Args:
        layout: the sizes of the mesh; they multiply to the world size.
        own: the meshes of a model that a script has divided itself.
    """

    def __init__(self, layout: Layout, world: World, own: OwnMeshes | None = None) -> None:
        self.layout, self.world, self._own = layout, world, own
        self.place: MeshPosition = layout.place(world.rank.world_rank)
        self._holders: dict[frozenset[str], tuple[int, ...]] = {}  # by how a tensor is cut

    @functools.cached_property
    def mesh(self) -> DeviceMesh:
        """The mesh with all dimensions; made by all ranks together."""
        return init_device_mesh(
            self.world.device.type, tuple(self.layout[:4]), mesh_dim_names=FACTORS
        )

    def group(self, name: str) -> dist.ProcessGroup:
        """The ranks that differ from this one only in one dimension."""
        return self.mesh[name].get_group()

    @property
    def data_rank(self) -> int:
        return self.layout.data_rank(self.world.rank.world_rank)

    @property
    def data_size(self) -> int:
        return self.layout.data_size

    @property
    def stream(self) -> int:
        """The number of this rank's random stream."""
        return self.layout.stream(self.world.rank.world_rank)

    @property
    def divided(self) -> bool:
        """Whether parameters are DTensors: fully_shard or parallelize_module made them."""
        return self.layout.fsdp > 1 or self.layout.tp > 1

    @property
    def replica(self) -> list[int]:
        """The global ranks, this one among them, that have one whole state together; empty if no
        other ranks have the same."""
        layout = self.layout
        if layout.ddp == 1 or layout.zero or (self._own and self._own.divided):
            return []
        ranks = range(self.world.size)
        return [rank for rank in ranks if layout.place(rank).ddp == self.place.ddp]

    @property
    def last(self) -> bool:
        """Whether this rank is in the last pipeline stage, which computes losses."""
        return self.place.pp == self.layout.pp - 1

    @property
    def speaks(self) -> bool:
        """Whether this rank's losses count: one rank for each share of a batch."""
        return self.last and self.place.tp == 0

    def holders(self, tensor: Tensor, optim: bool = False) -> tuple[int, ...]:
        """The global ranks, this one among them, that hold the same part of a tensor.

        Args:
            optim: whether it is the optimizer's.
        """
        if optim and self.layout.zero:
            return (self.world.rank.world_rank,)
        if self._own and (holders := self._own.holders(tensor)):
            return holders
        cut = _cut_dims(tensor)
        if cut not in self._holders:
            own = self.place._asdict()
            ranges = [
                [own[name]] if name == "pp" or name in cut else range(size)
                for name, size in zip(FACTORS, self.layout[:4], strict=True)
            ]
            places = itertools.starmap(MeshPosition, itertools.product(*ranges))
            self._holders[cut] = tuple(map(self.layout.rank, places))
        return self._holders[cut]

    def share(self, buffers: Sequence[Tensor]) -> None:
        """Give all ranks with the same part of the model the first one's buffers, which are the
        saved ones; a collective. DDP does this itself."""
        for name in FACTORS[1:] if buffers else ():
            if self.layout[FACTORS.index(name)] > 1:
                group = self.group(name)
                for buffer in buffers:
                    dist.broadcast(buffer, group_src=0, group=group)

    def tie(self) -> None:
        """Let no rank's device go on before all have come here; a collective."""
        dist.all_reduce(torch.zeros((), device=self.world.device))

    def clip(self, module: nn.Module, most: float) -> Tensor:
        """Limit the norm of the gradients over all ranks; the norm before. A collective."""
        parameters = list(module.parameters())
        if self.layout.plain:
            return clip_grad_norm_(parameters, most)
        gradients = [p.grad for p in parameters if p.grad is not None]
        total = torch.zeros((), dtype=torch.float64, device=self.world.device)
        for gradient in gradients:
            own = local(gradient).detach()
            total += own.double().square().sum() / len(self.holders(gradient))
        dist.all_reduce(total)
        norm = total.sqrt()
        factor = (most / (norm + 1e-6)).clamp(max=1.0)  # as in torch
        for gradient in gradients:
            own = local(gradient)
            own.mul_(factor.to(own.dtype))
        return norm


def _cut_dims(tensor: Tensor) -> frozenset[str]:
    """The mesh dimensions along which a tensor is divided."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return frozenset()
    placed = zip(mesh.mesh_dim_names, tensor.placements, strict=True)  # type: ignore[attr-defined]
    return frozenset(name for name, placement in placed if not placement.is_replicate())


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, without a copy."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class Scaler(torch.amp.GradScaler):
    """Loss scaling in which all ranks take a step, or none.

    Args:
        alike: all ranks have the same gradients; otherwise each checks its own.
    """

    def __init__(self, device: str, *, enabled: bool, alike: bool) -> None:
        super().__init__(device, enabled=enabled)
        self._alike = alike

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        if self._alike:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        everyone = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [local(p.grad) for p in everyone if p.grad is not None]
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inv_scale)
        dist.all_reduce(found_inf, dist.ReduceOp.MAX)
        return {found_inf.device: found_inf}
