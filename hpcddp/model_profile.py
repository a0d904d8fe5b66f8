"""A model, as far as an estimate of its memory needs it.

model_sketch.py finds it, memory_estimate.py reckons with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Amount(NamedTuple):
    """Bytes that follow from the samples of a micro-batch."""

    fixed: float = 0.0
    each: float = 0.0

    def of(self, samples: float) -> float:
        return self.fixed + self.each * samples


@dataclass(frozen=True)
class Weight:
    """One parameter.

    Args:
        size: bytes of a number.
        state: bytes that the optimizer keeps for each number.
        extra: bytes that it keeps beside, however many numbers there are.
        group: the optimizer's, -1 for none.
        part, block: where it is in the model; a block of -1 is none.
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
    """The model as one of several ranks of tp has it; lists go by part.

    Args:
        shapes: of each parameter.
        saved: what the backward pass needs of the forward pass.
        passed: what a part gives to the next.
        reduced: what the ranks of tp add up in a forward and backward pass.
        inner: what train.recompute computes again, of the largest block.
        unknown: why activations are not known; empty if they are.
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
    """A model, as far as a budget needs it. A text in place of a value says why there is none.

    Args:
        buffers: bytes, by part.
        stages: number of a pipeline's stages -> the parts of each.
        views: ranks of tp -> the model as one of them has it.
        micros: a mesh -> samples of a micro-batch, and micro-batches of a step.
        memory: bytes of this machine's GPU; 0 without one.
        notes: what a person should know of how they were found.
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
        """What model_sketch.py wrote."""
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
