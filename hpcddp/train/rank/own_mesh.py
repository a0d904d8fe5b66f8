"""Which ranks hold the same part of a tensor, in a model that the script itself has divided.

A script calls fully_shard or parallelize_module on its model and chooses the device meshes. The
names of their dimensions say nothing here, so the ranks exchange their coordinates once.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hpcddp.errors import UserError
from hpcddp.train.rank.world import World

_HINT = "hpcddp.attach requires the same model on all ranks, whole or as DTensors (fully_shard)"


class OwnMeshes:
    """The device meshes of a model's parameters and buffers; a collective.

    Args:
        tensors: the model's parameters and buffers, by name.

    Raises:
        UserError: on all ranks, if their models differ, or one is outside of a mesh.
    """

    def __init__(self, world: World, tensors: Mapping[str, Tensor]) -> None:
        self._rank = world.rank.world_rank
        meshes = dict.fromkeys(t.device_mesh for t in tensors.values() if hasattr(t, "device_mesh"))
        names = " ".join(f"{name} {tuple(t.shape)}" for name, t in tensors.items())
        own = zlib.crc32(names.encode()), [mesh.get_coordinate() for mesh in meshes]
        everyone = world.gather(own)
        if any(places for _, places in everyone):
            _check(everyone)
        self._places = {
            mesh: [places[i] for _, places in everyone] for i, mesh in enumerate(meshes)
        }

    @property
    def divided(self) -> bool:
        """Whether a tensor is a DTensor."""
        return bool(self._places)

    def holders(self, tensor: Tensor) -> tuple[int, ...] | None:
        """The ranks, this one among them, that hold the same part of a tensor; None if it is no
        DTensor. Ranks that only differ outside of its mesh hold the same part.

        Raises:
            UserError: the optimizer's state lies on another mesh than the model, or is partial.
        """
        mesh = getattr(tensor, "device_mesh", None)
        if mesh is None:
            return None
        placements = tensor.placements  # type: ignore[attr-defined]
        if mesh not in self._places or any(p.is_partial() for p in placements):
            raise UserError(
                f"the optimizer has a tensor on {mesh} with {placements}, unlike its parameters",
                where="hpcddp.attach",
                hint="use an optimizer whose state is divided as its parameters are",
            )
        places = self._places[mesh]
        cut = [i for i, placement in enumerate(placements) if not placement.is_replicate()]
        own = places[self._rank]
        return tuple(r for r, place in enumerate(places) if all(place[i] == own[i] for i in cut))


def _check(everyone: list[tuple[int, list[Any]]]) -> None:
    """All ranks must have the same tensors, and a place in each mesh."""
    for rank, (names, places) in enumerate(everyone):
        if names != everyone[0][0] or len(places) != len(everyone[0][1]):
            raise UserError(
                f"ranks 0 and {rank} have different models",
                where="hpcddp.attach",
                hint=_HINT,
            )
        if None in places:
            raise UserError(
                f"rank {rank} is outside of the device mesh of a parameter",
                where="hpcddp.attach",
                hint=_HINT,
            )
