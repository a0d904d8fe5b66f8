"""Plain files of weights, {name: tensor}: exported from a run, or the start of another one.

There are two forms: torch's own, and safetensors. Reading a file runs none of its content: from a
pickle, torch reads only tensors and plain containers.
"""

from __future__ import annotations

import os
import pickle
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpcddp.errors import CheckpointError, CheckpointForeign, UserError
from hpcddp.rundir import RunDir
from hpcddp.spec import JobSpec
from hpcddp.train.checkpoint.stored_tensors import MODEL, SUFFIX, safetensors
from hpcddp.train.checkpoint.stored_tensors import read as read_part

PACKED = ("state_dict", "model", "model_state_dict")  # where training programs put the weights
REPLICATED = "module."  # prefix of all names: DistributedDataParallel, DataParallel
COMPILED = "_orig_mod"  # anywhere in a name: torch.compile
SHOWN = 3  # most differences named in an error

ALONE = "save the weights alone: torch.save(model.state_dict(), FILE)"


def start(module: torch.nn.Module, spec: JobSpec) -> None:
    """Load the weights that the job starts from (``start_from``), if any, into a new run's model.

    Raises:
        CheckpointError: the file cannot be read, or is of another model.
    """
    if spec.start_from:
        load_into(module, read(Path(spec.start_from)), spec.start_from)


def export(run: RunDir, target: Path) -> int:
    """Write {parameter name: tensor} of the newest complete checkpoint, without a process group.

    To read it: ``model.load_state_dict(torch.load(target, weights_only=True))``, or for the suffix
    .safetensors ``model.load_state_dict(safetensors.torch.load_file(target))``.

    Returns: the checkpoint's step.

    Raises:
        CheckpointError: there is no complete, undamaged checkpoint, or one cannot be read.
        UserError: the target cannot be written.
    """
    from hpcddp.train.checkpoint import checkpoint, newest

    try:
        folder = newest.alone(run)
        tensors = read_part(folder, MODEL) if folder else {}
    except OSError as error:  # exporting an older one instead would mislead
        what = f"cannot be read: {error.strerror}"
        raise CheckpointError(what, where=str(error.filename or run.checkpoints)) from None
    if folder:
        write({name.removeprefix(MODEL): t for name, t in tensors.items()}, target)
        return checkpoint.step_of(folder) or 0
    raise CheckpointError(
        "the run has no complete checkpoint",
        where=str(run.checkpoints),
        hint="wait for the first one: after checkpoint.every steps, or at the end",
    )


def write(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a file of weights, completely or not at all; the suffix selects the form.

    Raises:
        UserError: the file cannot be written, or the package safetensors is missing.
    """
    save = _safetensors_writer() if path.suffix == SUFFIX else torch.save
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            aside.touch()
            mode = aside.stat().st_mode  # by the user's umask; safetensors would use 0600
            save(dict(tensors), aside)
            aside.chmod(mode)
            with aside.open("rb") as f:
                os.fsync(f.fileno())
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
    except Exception as error:  # of each form, for a missing folder or an unknown dtype
        raise UserError(f"cannot be written: {error}", where=str(path)) from None


def _safetensors_writer() -> Callable[[dict[str, Tensor], Path], None]:
    save = safetensors().save_file

    def write(tensors: dict[str, Tensor], path: Path) -> None:
        """Write; the form has neither shared memory nor strides, so such tensors are copied."""
        seen: set[int] = set()
        for name, tensor in tensors.items():
            memory = tensor.untyped_storage().data_ptr()
            if memory in seen or not tensor.is_contiguous():
                tensors[name] = tensor.clone(memory_format=torch.contiguous_format)
            seen.add(memory)
        save(tensors, path)

    return write


def read(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, on the CPU, by their names in the bare model.

    The form follows from the content, not from the suffix. The tensors may be mapped into memory:
    then they are read from the file when they are used.

    Raises:
        CheckpointError: the file is missing or damaged, or contains more than tensors.
        UserError: the package safetensors is missing.
    """
    try:
        with path.open("rb") as f:
            head = f.read(9)
    except OSError as error:
        hint = (
            "name a file: `hpcddp export RUN FILE` writes one from a run" if path.is_dir() else ""
        )
        what = f"cannot be read: {error.strerror}"
        raise CheckpointError(what, where=str(path), hint=hint) from None
    if not head:
        raise CheckpointError(
            "the file is empty", where=str(path), hint="check that it was copied completely"
        )
    # safetensors begins with its header's length in 8 bytes, and that is JSON.
    content = _safetensors_file(path) if head[8:] == b"{" else _torch_file(path, head)
    return _bare(_tensors(content, str(path)), str(path))


def _safetensors_file(path: Path) -> Any:
    load = safetensors().load_file
    try:
        return load(path)
    except Exception as error:
        raise _damaged(path, error) from None


def _torch_file(path: Path, head: bytes) -> Any:
    try:
        with warnings.catch_warnings(), path.open("rb") as f:
            warnings.simplefilter("ignore")  # about old forms; an unreadable file is an error
            # Files from before torch 1.6 are not zip files and cannot be mapped. Torch infers the
            # form from a path's suffix, and maps only paths.
            mapped = head.startswith(b"PK\x03\x04") and path.suffix != SUFFIX
            source = path if mapped else f
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # a damaged pickle raises anything
        if named := re.search(r"GLOBAL ([\w.]+)", str(error)):
            what = f"it contains {named[1]}, which is not a tensor; hpcddp ran no code from it"
            raise CheckpointError(what, where=str(path), hint=ALONE) from None
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> CheckpointError:
    """The error. It has only the first sentence of torch's message: the rest is advice, such as to
    run the file's code."""
    reason = re.split(r"\. |\.?\n", str(error) or type(error).__name__, maxsplit=1)[0]
    if isinstance(error, pickle.UnpicklingError):
        reason = "it contains no named tensors"
    return CheckpointError(
        f"not a weights file, or a damaged one: {reason:.200}",
        where=str(path),
        hint="check that it was copied completely; supported are torch.save and safetensors files",
    )


def _tensors(content: Any, where: str) -> dict[str, Tensor]:
    """The {name: tensor} in a file's content, which often has more around it."""
    if isinstance(content, Mapping):
        inner = (content.get(name) for name in PACKED)
        content = next((packed for packed in inner if isinstance(packed, Mapping)), content)
    if not isinstance(content, Mapping) or not content:
        got = "an empty one" if isinstance(content, Mapping) else type(content).__name__
        what = f"expected a dictionary of named tensors, got {got}"
        raise CheckpointError(what, where=where, hint=ALONE)
    for name, tensor in content.items():
        if type(name) is not str or not _plain(tensor):
            what = f"{name!r:.80} is {type(tensor).__name__}, not a plain tensor"
            raise CheckpointError(what, where=where, hint=ALONE)
    return {name: tensor.detach() for name, tensor in content.items()}


def _plain(tensor: object) -> bool:
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and isinstance(tensor, Tensor)
        and (tensor.layout, tensor.device.type) == (torch.strided, "cpu")
    )


def _bare(tensors: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """The tensors without the prefixes of DistributedDataParallel and torch.compile in names."""
    bare: dict[str, Tensor] = {}
    for name, tensor in zip(_bare_names(tensors), tensors.values(), strict=True):
        if name in bare:
            what = f"{name} occurs twice, once without {COMPILED}"
            raise CheckpointError(what, where=where, hint=ALONE)
        bare[name] = tensor
    return bare


def _bare_names(names: Iterable[str]) -> list[str]:
    bare = [name.split(".") for name in names]
    bare = [[p for p in parts[:-1] if p != COMPILED] + parts[-1:] for parts in bare]
    joined = [".".join(parts) for parts in bare]
    while joined and all(name.startswith(REPLICATED) for name in joined):
        joined = [name.removeprefix(REPLICATED) for name in joined]
    return joined


def load_into(module: torch.nn.Module, tensors: Mapping[str, Tensor], where: str) -> None:
    """Copy tensors into a model's own, which keep their dtype and device.

    If a model uses one tensor under several names, one of them is enough.

    Args:
        where: the file they come from.

    Raises:
        CheckpointError: names or shapes differ; the model is unchanged.
    """
    state = module.state_dict(keep_vars=True)  # one object where two names share a tensor
    ours = _bare({n: t for n, t in state.items() if isinstance(t, Tensor)}, where)
    theirs = _bare(tensors, where)
    shared = {id(ours[name]): name for name in theirs if name in ours}
    for name, tensor in ours.items():
        if name not in theirs and id(tensor) in shared:
            theirs[name] = theirs[shared[id(tensor)]]
    _check_same(ours, theirs, where)
    with torch.no_grad():
        for name, tensor in ours.items():
            tensor.copy_(theirs[name])


def _check_same(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], where: str) -> None:
    wrong = [
        f"{name} is {_shape(theirs, name)} in the file and {_shape(ours, name)} in the model"
        for name in {**ours, **theirs}
        if _shape(theirs, name) != _shape(ours, name)
    ]
    if wrong:
        more = f"; {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise CheckpointForeign(
            f"the file is of another model: {', '.join(wrong[:SHOWN])}{more}",
            where=where,
            hint=_advice(ours.keys(), theirs.keys()),
        )


def _shape(tensors: Mapping[str, Tensor], name: str) -> str:
    return str(list(tensors[name].shape)) if name in tensors else "missing"


def _advice(ours: Iterable[str], theirs: Iterable[str]) -> str:
    here, there = set(ours), set(theirs)
    if here == there:
        return "the names match, the sizes differ: set [model] as it was for this file"
    for longer, shorter, place in ((there, here, "in the file"), (here, there, "in the model")):
        prefix = min(longer, default="").partition(".")[0] + "."
        if {prefix + name for name in shorter} == longer:
            return f"rename them: {place} each name begins with {prefix!r}, the rest is the same"
    return "change model() or [model] so that it makes the model of the file"
