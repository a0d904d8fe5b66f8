"""What a checkpoint holds: every tensor of the training under a plain name, and the rest as JSON.

    model.<name>                 parameters and buffers, named as the plain module names them
    optim.<name>.<state>         the optimizer's tensors, by the parameter they belong to
    rng.<rank>.<generator>       the random generators of every rank

Names come from torch's own getters, so they are the same however the model is spread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpcddp.errors import CheckpointError
from hpcddp.train import seeding


class State:
    """A module and its optimizer as flat tensors, which are the live ones: reading into them
    and then calling ``apply`` restores the training.

    On an optimizer that took no step yet, this makes its state.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        self._module, self._optimizer = module, optimizer
        self._model, self._optim = get_state_dict(module, optimizer)
        self.tensors: dict[str, Tensor] = {}
        self.plain: dict[str, dict[str, Any]] = {}  # numbers in the optimizer's state
        for name, value in self._model.items():
            if not isinstance(value, Tensor):
                raise CheckpointError(
                    f"the model's state {name} is not a tensor",
                    hint="checkpoints hold tensors only: register it as a buffer",
                )
            self.tensors[f"model.{name}"] = value
        for name, states in self._states.items():
            for key, value in states.items():
                if isinstance(value, Tensor):
                    self.tensors[f"optim.{name}.{key}"] = value
                else:
                    self.plain.setdefault(name, {})[key] = value

    @property
    def _states(self) -> dict[str, dict[str, Any]]:
        states: dict[str, dict[str, Any]] = self._optim["state"]  # type: ignore[assignment]
        return states

    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's options by parameter group, as plain data."""
        return [
            {k: _plain(v) for k, v in group.items() if k != "params"}
            for group in self._optimizer.param_groups
        ]

    def only(self, names: set[str]) -> None:
        """Forget optimizer state that a checkpoint has not: its parameters had no gradient."""
        for name, states in list(self._states.items()):
            for key in list(states):
                if isinstance(states[key], Tensor) and f"optim.{name}.{key}" not in names:
                    del states[key], self.tensors[f"optim.{name}.{key}"]
            if not states:
                del self._states[name]

    def apply(self, meta: Mapping[str, Any], *, options: bool) -> None:
        """Put the state into module and optimizer.

        Args:
            meta: what ``groups`` and ``plain`` were when it was saved.
            options: restore the optimizer's options too; without, the job file's count.
        """
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

        for name, values in meta["state"].items():
            self._states.setdefault(name, {}).update(values)
        live = [dict(group) for group in self._optimizer.param_groups]
        set_state_dict(
            self._module,
            self._optimizer,
            model_state_dict=self._model,
            optim_state_dict=self._optim,
            options=StateDictOptions(strict=False),  # see `only`; names were compared before
        )
        saved = meta["param_groups"]
        for i, group in enumerate(self._optimizer.param_groups):
            group.update({k: v for k, v in live[i].items() if k != "params"})
            if options and len(saved) == len(live):
                group.update({k: _like(v, live[i].get(k)) for k, v in saved[i].items()})


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value


def _like(value: Any, live: Any) -> Any:
    """A value from JSON in the type that the optimizer had: tuples and tensors."""
    if isinstance(live, Tensor):
        return torch.as_tensor(value, dtype=live.dtype, device=live.device)
    return tuple(value) if isinstance(live, tuple) else value


def rng_tensors(rank: int, device: torch.device) -> dict[str, Tensor]:
    """This rank's random generators, by their names in a checkpoint."""
    return {f"rng.{rank}.{k}": v for k, v in seeding.rng_state(device).items()}


def set_rng(tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Put back what ``rng_tensors`` gave."""
    state = {name.rsplit(".", 1)[1]: tensor for name, tensor in tensors.items()}
    seeding.set_rng_state(state, device)
