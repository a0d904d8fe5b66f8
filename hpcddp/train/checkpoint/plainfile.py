"""Plain files of weights, {name: tensor}: exported from a run, and the start of another.

Two forms: torch's own, and safetensors. Nothing that a file holds is run when it is read: of a
pickle, torch takes tensors and plain containers, and refuses everything else.
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

SUFFIX = ".safetensors"
PACKED = ("state_dict", "model", "model_state_dict")  # where training programs put the weights
REPLICATED = "module."  # before all names: DistributedDataParallel, DataParallel
COMPILED = "_orig_mod"  # anywhere in a name: torch.compile
SHOWN = 3  # differences that an error names

ALONE = "save the weights alone: torch.save(model.state_dict(), FILE)"


def start(module: torch.nn.Module, spec: JobSpec) -> None:
    """Give a new run's model the weights that its job starts from, if it names any.

    Raises:
        CheckpointError: the file cannot be read, or is of another model.
    """
    if spec.start_from:
        load_into(module, read(Path(spec.start_from)), spec.start_from)


def export(run: RunDir, target: Path) -> int:
    """Write {parameter name: tensor} of the newest complete checkpoint, without a process group.

    ``model.load_state_dict(torch.load(target, weights_only=True))`` reads it, or for a target that
    ends in .safetensors ``model.load_state_dict(safetensors.torch.load_file(target))``.

    Returns: the checkpoint's step.

    Raises:
        CheckpointError: there is no complete, undamaged checkpoint, or one cannot be read.
        UserError: the target cannot be written.
    """
    from hpcddp.train.checkpoint import checkpoint, dcp_files, newest

    try:
        folder = newest.alone(run)
        tensors = dcp_files.read_all(folder, "model.") if folder else {}
    except OSError as error:  # an older one is not what was asked for
        what = f"cannot be read: {error.strerror}"
        raise CheckpointError(what, where=str(error.filename or run.checkpoints)) from None
    if folder:
        write({name.removeprefix("model."): t for name, t in tensors.items()}, target)
        return checkpoint.step_of(folder) or 0
    raise CheckpointError(
        "there is no complete checkpoint",
        where=str(run.checkpoints),
        hint="the first one is saved after checkpoint.every steps, or at the end",
    )


def write(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a file of weights, which is there wholly or not at all; its suffix says the form.

    Raises:
        UserError: the file cannot be written, or the package safetensors is missing.
    """
    save = _safetensors_writer() if path.suffix == SUFFIX else torch.save
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            aside.touch()
            mode = aside.stat().st_mode  # as the user's umask says; safetensors takes 0600
            save(dict(tensors), aside)
            aside.chmod(mode)
            with aside.open("rb") as f:
                os.fsync(f.fileno())
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
    except Exception as error:  # each form has its own for a missing folder or an unknown dtype
        raise UserError(f"cannot be written: {error}", where=str(path)) from None


def _safetensors_writer() -> Callable[[dict[str, Tensor], Path], None]:
    save = _safetensors().save_file

    def write(tensors: dict[str, Tensor], path: Path) -> None:
        """The form knows neither shared memory nor strides: such tensors become copies."""
        seen: set[int] = set()
        for name, tensor in tensors.items():
            memory = tensor.untyped_storage().data_ptr()
            if memory in seen or not tensor.is_contiguous():
                tensors[name] = tensor.clone(memory_format=torch.contiguous_format)
            seen.add(memory)
        save(tensors, path)

    return write


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise UserError(
            "the package safetensors is not installed",
            where=SUFFIX,
            hint="pip install 'hpcddp[safetensors]' brings it; other suffixes are torch's own form",
        ) from None
    return safetensors.torch


def read(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, on the CPU, by their names in the bare model.

    A file's content says its form, not its suffix. Its tensors may be mapped into memory: they
    are read from the file where they are used.

    Raises:
        CheckpointError: the file is missing, damaged, or holds something else than tensors.
        UserError: the package safetensors is missing.
    """
    try:
        with path.open("rb") as f:
            head = f.read(9)
    except OSError as error:
        hint = "hpcddp export writes one file of a run's weights" if path.is_dir() else ""
        what = f"cannot be read: {error.strerror}"
        raise CheckpointError(what, where=str(path), hint=hint) from None
    if not head:
        raise CheckpointError("it is empty", where=str(path), hint="was it copied wholly?")
    # safetensors begins with its header's length in 8 bytes, and that is JSON.
    content = _safetensors_file(path) if head[8:] == b"{" else _torch_file(path, head)
    return _bare(_tensors(content, str(path)), str(path))


def _safetensors_file(path: Path) -> Any:
    load = _safetensors().load_file
    try:
        return load(path)
    except Exception as error:
        raise _damaged(path, error) from None


def _torch_file(path: Path, head: bytes) -> Any:
    try:
        with warnings.catch_warnings(), path.open("rb") as f:
            warnings.simplefilter("ignore")  # of old forms; an unreadable file is an error
            # Files from before torch 1.6 are no zip, and cannot be mapped. Torch takes a path's
            # suffix for the form, and maps nothing but paths.
            mapped = head.startswith(b"PK\x03\x04") and path.suffix != SUFFIX
            source = path if mapped else f
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # a damaged pickle raises anything
        if named := re.search(r"GLOBAL ([\w.]+)", str(error)):
            what = f"it names {named[1]}, which is no tensor; nothing in it was run"
            raise CheckpointError(what, where=str(path), hint=ALONE) from None
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> CheckpointError:
    """torch's message goes on with advice, such as to run the file's code: its first line is
    enough."""
    reason = re.split(r"\. |\.?\n", str(error) or type(error).__name__, maxsplit=1)[0]
    if isinstance(error, pickle.UnpicklingError):
        reason = "it holds no tensors by name"
    return CheckpointError(
        f"no file of weights, or a damaged one: {reason:.200}",
        where=str(path),
        hint="was it copied wholly? It is torch.save's, or safetensors'",
    )


def _tensors(content: Any, where: str) -> dict[str, Tensor]:
    """The {name: tensor} in a file's content; programs often put more around it."""
    if isinstance(content, Mapping):
        inner = (content.get(name) for name in PACKED)
        content = next((packed for packed in inner if isinstance(packed, Mapping)), content)
    if not isinstance(content, Mapping) or not content:
        what = f"it holds {type(content).__name__}, and no tensors by name"
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
    """The same tensors without what DistributedDataParallel and torch.compile put into names."""
    bare: dict[str, Tensor] = {}
    for name, tensor in zip(_bare_names(tensors), tensors.values(), strict=True):
        if name in bare:
            what = f"{name} is there twice, once without {COMPILED}"
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

    Where a model uses one tensor under several names, one of them is enough.

    Args:
        where: the file they come from.

    Raises:
        CheckpointError: names or shapes differ; the model is as it was.
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
        f"{name} is {_shape(theirs, name)} there and {_shape(ours, name)} here"
        for name in {**ours, **theirs}
        if _shape(theirs, name) != _shape(ours, name)
    ]
    if wrong:
        more = f"; {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise CheckpointForeign(
            f"it is of another model: {', '.join(wrong[:SHOWN])}{more}",
            where=where,
            hint=_advice(ours.keys(), theirs.keys()),
        )


def _shape(tensors: Mapping[str, Tensor], name: str) -> str:
    return str(list(tensors[name].shape)) if name in tensors else "missing"


def _advice(ours: Iterable[str], theirs: Iterable[str]) -> str:
    here, there = set(ours), set(theirs)
    if here == there:
        return "the names are the same: set the job's [model] as it was for this file"
    for longer, shorter, place in ((there, here, "there"), (here, there, "here")):
        prefix = min(longer, default="").partition(".")[0] + "."
        if {prefix + name for name in shorter} == longer:
            return f"the names are the same, but {place} each begins with {prefix!r}: rename them"
    return "the task's model() must make the model that the file is of"
