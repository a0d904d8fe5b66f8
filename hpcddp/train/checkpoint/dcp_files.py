"""Tensors in the files of torch.distributed.checkpoint (DCP), read without running their content.

DCP's ``.metadata`` is a pickle. This module reads it with an unpickler that allows only the few
classes that such a file needs, by their exact names; it reads tensors with ``weights_only``. Byte
entries, which DCP would unpickle without limits, are not among those classes.

Import this module only to save or read a checkpoint: its import would delay the first step.
"""

from __future__ import annotations

import contextlib
import io
import logging
import pickle
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PosixPath
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from hpcddp.errors import CheckpointError
from hpcddp.train.checkpoint.disk_retry import ElsewhereError, naming

METADATA = ".metadata"

Shapes = dict[str, tuple[torch.Size, torch.dtype]]  # of a checkpoint's tensors, by name

_DTYPES = ("float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 "
           "complex64 complex128 int64 int32 int16 int8 uint8 bool")  # fmt: skip
_PACKAGE = "torch.distributed.checkpoint"
_LOGS = (_PACKAGE, "c10d-NullHandler-dcp_logger")


def _member(kind: Any, name: Any) -> Any:
    """A member of an enumeration: Python 3.11.0 to 3.11.3 pickle it as an attribute."""
    if kind is not metadata._MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f"it refers to an attribute of {kind!r}")
    return kind[name]


ALLOWED: dict[tuple[str, str], Any] = {
    ("builtins", "getattr"): _member,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): {"torch.strided": torch.strided}.__getitem__,
    ("pathlib", "PosixPath"): PosixPath,
    ("pathlib._local", "PosixPath"): PosixPath,
    (f"{_PACKAGE}.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    **{("torch", name): getattr(torch, name) for name in _DTYPES.split()},
    **{
        (f"{_PACKAGE}.metadata", name): getattr(metadata, name)
        for name in (
            "Metadata",
            "TensorStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "_MEM_FORMAT_ENCODING",
            "MetadataIndex",
            "StorageMeta",
        )
    },
}


class Slice(Tensor):
    """A rank's part of a tensor, which DCP reads and writes in place, by its offsets.

    It has the memory of the part and the size of the whole tensor.
    """

    part: Tensor
    whole: torch.Size
    offsets: torch.Size

    @staticmethod
    def of(part: Tensor, whole: torch.Size, offsets: Sequence[int]) -> Tensor:
        """The slice; the part itself if it is the whole tensor."""
        part = part.detach()
        if part.shape == whole:
            return part
        made: Slice = Tensor._make_subclass(Slice, part)
        made.part, made.whole, made.offsets = part, whole, torch.Size(offsets)
        return made

    def size(self) -> torch.Size:  # type: ignore[override]
        return self.whole

    # torch.distributed._checkpointable: DCP's interface for a tensor that is divided over ranks.

    def __create_chunk_list__(self) -> list[metadata.ChunkStorageMetadata]:
        return [metadata.ChunkStorageMetadata(self.offsets, self.part.shape)]

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        (chunk,) = self.__create_chunk_list__()
        properties = metadata.TensorProperties.create_from_tensor(self.part)
        return [
            WriteItem(
                index=metadata.MetadataIndex(name, self.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.whole),
            )
        ]

    def __get_tensor_shard__(self, _: Any) -> Tensor:
        return self.part


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}") from None


def read_metadata(folder: Path) -> metadata.Metadata:
    """The metadata of a checkpoint's folder: its tensors and where they lie.

    Raises:
        CheckpointError: the file is damaged, or refers to more than tensors.
        OSError: the file cannot be read.
    """
    path = folder / METADATA
    with naming(path):
        data = path.read_bytes()
    try:
        index = _Unpickler(io.BytesIO(data)).load()
        _check(index)
    except Exception as error:  # a damaged pickle raises anything
        raise CheckpointError(
            f"cannot read the checkpoint's metadata: {error}",
            where=str(path),
            hint="remove this checkpoint to use an older one; hpcddp ran no code from it",
        ) from None
    return index  # type: ignore[no-any-return]


def _check(index: Any) -> None:
    """Allow only tensors, in files of the folder itself."""
    if type(index) is not metadata.Metadata:
        raise ValueError("it is not an index of tensors")
    for name, entry in index.state_dict_metadata.items():
        if type(name) is not str or type(entry) is not metadata.TensorStorageMetadata:
            raise ValueError(f"{name!r:.80} is not a tensor")
    for info in index.storage_data.values():
        if Path(info.relative_path).name != info.relative_path:
            raise ValueError(f"{info.relative_path!r:.80} is outside of the checkpoint folder")
        if getattr(info, "transform_descriptors", None):
            raise ValueError("its tensors are transformed")


class _Reader(FileSystemReader):
    """Uses metadata that were read before; DCP's own reader would unpickle them without limits."""

    def __init__(self, folder: Path, index: metadata.Metadata) -> None:
        super().__init__(folder)
        self._metadata = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        self._metadata.storage_meta = metadata.StorageMeta(load_id=self.load_id)
        return self._metadata


class _TensorFiles(FileSystem):
    def mkdir(self, path: Any) -> None:
        """Do nothing: a newer attempt removed the missing folder, and it must not reappear."""


class _Writer(FileSystemWriter):
    """Writes tensors in host memory into an existing folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=True, per_thread_copy_ahead=0)
        self.fs = _TensorFiles()


def shapes(folder: Path) -> Shapes:
    """Name -> shape and dtype of every tensor of a checkpoint."""
    entries = read_metadata(folder).state_dict_metadata
    return {
        name: (entry.size, entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, metadata.TensorStorageMetadata)
    }


def empty(there: Shapes, prefix: str) -> dict[str, Tensor]:
    """New CPU tensors for a checkpoint's names with this prefix, for ``read`` to fill."""
    return {
        name: torch.empty(size, dtype=dtype)
        for name, (size, dtype) in there.items()
        if name.startswith(prefix)
    }


def write(
    folder: Path,
    tensors: Mapping[str, Tensor],
    group: dist.ProcessGroup | None,
    *,
    alone: bool = False,
) -> None:
    """Write all ranks' tensors and slices into an existing folder, with fsync; a collective, unless
    ``alone``.

    A tensor of several ranks is written once.

    Raises:
        CheckpointError: on all ranks, with the first rank's reason.
    """
    with _errors(folder), _quiet() if alone else contextlib.nullcontext():
        save(
            dict(tensors),
            storage_writer=_Writer(folder),
            process_group=None if alone else group,
            no_dist=alone,
        )


def read(
    folder: Path,
    index: metadata.Metadata,
    tensors: Mapping[str, Tensor],
    group: dist.ProcessGroup | None,
    *,
    alone: bool = False,
) -> None:
    """Fill the tensors in place; a collective, unless ``alone``.

    Args:
        index: the folder's metadata.

    Raises:
        CheckpointError: on all ranks, with the first rank's reason.
        OSError: on all ranks; a file cannot be read.
    """
    with _errors(folder, reading=True), _quiet() if alone else contextlib.nullcontext():
        load(
            dict(tensors),
            storage_reader=_Reader(folder, index),
            process_group=None if alone else group,
            no_dist=alone,
        )


def read_all(folder: Path, prefix: str = "") -> dict[str, Tensor]:
    """The tensors whose names have the prefix, on the CPU; needs no process group."""
    tensors = empty(shapes(folder), prefix)
    read(folder, read_metadata(folder), tensors, None, alone=True)
    return tensors


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's warning that it works without a process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


@contextlib.contextmanager
def _errors(folder: Path, *, reading: bool = False) -> Iterator[None]:
    """Convert DCP's exceptions, with the first rank's reason. Silence its logs, which repeat them
    and list every tensor."""
    logs = [logging.getLogger(name) for name in _LOGS]
    levels = [log.level for log in logs]
    for log in logs:
        log.setLevel(logging.CRITICAL)
    try:
        yield
    except CheckpointException as error:
        rank, (reason, _) = next(iter(error.failures.items()))
        if reading and isinstance(reason, OSError):
            reason.filename = reason.filename or str(folder)
            raise ElsewhereError(rank, reason) from None
        raise CheckpointError(
            f"rank {rank}: {type(reason).__name__}: {reason}", where=str(folder)
        ) from None
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)
