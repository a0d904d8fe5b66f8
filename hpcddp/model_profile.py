"""The profile of a model, for estimates of its memory.

model_sketch.py makes it, memory_estimate.py uses it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Amount(NamedTuple):
    """Bytes as a function of the samples of a micro-batch."""

    fixed: float = 0.0
    each: float = 0.0

    def of(self, samples: float) -> float:
        return self.fixed + self.each * samples


@dataclass(frozen=True)
class Weight:
    """One parameter.

    Args:
        size: bytes of an element.
        state: bytes of the optimizer's state per element.
        extra: bytes of the optimizer's state per parameter.
        group: the optimizer's, -1 for none.
        part, block: its place in the model; -1 for no block.
    """

    name: str
    size: int
    trained: bool
    state: float = 0.0
    extra: float = 0.0
    group: int = -1
    part: int = 0
    block: int = -1


@dataclass(frozen=True)
class TensorShare:
    """The model on one of several ranks of tp; lists are by part.

    Args:
        shapes: of each parameter.
        saved: activations for the backward pass.
        passed: output of a part for the next.
        reduced: bytes that the ranks of tp sum in a forward and backward pass.
        inner: activations that train.recompute recomputes, of the largest block.
        unknown: why activations are unknown; empty if they are known.
    """

    shapes: list[list[int]]
    saved: list[Amount] = field(default_factory=list)
    passed: list[Amount] = field(default_factory=list)
    reduced: list[Amount] = field(default_factory=list)
    inner: Amount = Amount()
    unknown: str = ""

    @classmethod
    def load(cls, data: dict[str, Any]) -> TensorShare:
        lists = {n: [Amount(*row) for row in data[n]] for n in ("saved", "passed", "reduced")}
        return cls(data["shapes"], **lists, inner=Amount(*data["inner"]), unknown=data["unknown"])


@dataclass(frozen=True)
class ModelProfile:
    """A model's profile. A text in place of a value is the reason why it is missing.

    Args:
        buffers: bytes, by part.
        stages: number of a pipeline's stages -> the parts of each.
        views: ranks of tp -> the model on one of them.
        micros: a mesh -> samples of a micro-batch, and micro-batches of a step.
        memory: bytes of this machine's GPU; 0 without one.
        notes: for the user, about the profile.
    """

    weights: list[Weight]
    buffers: list[int]
    stages: dict[int, list[list[int]] | str]
    views: dict[int, TensorShare | str]
    micros: dict[str, tuple[int, int] | str]
    memory: int = 0
    notes: list[str] = field(default_factory=list)

    @classmethod
    def load(cls, data: dict[str, Any]) -> ModelProfile:
        """The profile that model_sketch.py wrote."""
        views = {int(n): _or_text(v, TensorShare.load) for n, v in data["views"].items()}
        return cls(
            [Weight(**row) for row in data["weights"]],
            data["buffers"],
            {int(n): parts for n, parts in data["stages"].items()},
            views,
            {mesh: _or_text(micro, tuple) for mesh, micro in data["micros"].items()},
            data["memory"],
            data["notes"],
        )


def _or_text(value: Any, make: Any) -> Any:
    return value if isinstance(value, str) else make(value)
