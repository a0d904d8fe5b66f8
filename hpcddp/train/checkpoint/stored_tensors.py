"""The tensors of a complete checkpoint by their names, whoever wrote it; needs no process group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpcddp.errors import UserError, install_extra
from hpcddp.train.checkpoint import damage

MODEL, OPTIMIZER = "model.", "optim."  # prefixes of their tensors' names
SUFFIX = ".safetensors"


def read(folder: Path, part: str) -> dict[str, Tensor]:
    """The tensors of one part, on the CPU.

    Args:
        part: MODEL or OPTIMIZER.

    Raises:
        CheckpointError: it is damaged.
        OSError: a file cannot be read.
        UserError: the package safetensors is missing.
    """
    from hpcddp.train.checkpoint import dcp_files

    if not damage.meta(folder).get("files"):
        return dcp_files.read_all(folder, part)
    if part == MODEL:
        shards = [safetensors().load_file(path) for path in sorted(folder.rglob(f"*{SUFFIX}"))]
        return {f"{part}{name}": t for shard in shards for name, t in shard.items()}
    content = torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True)
    return {
        f"{part}{number}.{name}": value
        for number, values in content["state"].items()
        for name, value in values.items()
        if isinstance(value, Tensor)
    }


def safetensors() -> Any:
    """The module safetensors.torch.

    Raises:
        UserError: it is not installed.
    """
    try:
        import safetensors.torch
    except ImportError:
        raise UserError(
            "the package safetensors is not installed",
            where=SUFFIX,
            hint=f"{install_extra('safetensors')}; or use another suffix",
        ) from None
    return safetensors.torch
