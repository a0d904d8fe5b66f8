"""ImageFolder: images by class as a map-style dataset, from a folder or a store.

ROOT/CLASS/NAME.jpg       a folder, s3://bucket/prefix, or any URL that fsspec can open
ROOT/NAME-000000.tar      the same images in tar shards, which are read faster (see shards.py)
"""

from __future__ import annotations

import io
import os
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from hpcddp import record
from hpcddp.data import folder
from hpcddp.data.listings import listing_of, rank_of_here, run_of_here
from hpcddp.data.node_cache.cache import shared
from hpcddp.data.places import Place
from hpcddp.data.reading import ObjectCache, Reading
from hpcddp.errors import ObjectUnreadable, UserError, install_extra
from hpcddp.spec import DataSpec

POLICIES = ("stop", "skip")
HINT = 'fix or remove the image, or set data.on_bad = "skip" to use another one of its class'


class ImageFolder(Dataset[tuple[Any, Any]]):
    """Images with the number of their class, as a map-style dataset: ``(image, class)`` by index.

    Samples are sorted by class and name. The class of an image is the first folder below ``root``.
    A run lists the root once: all its ranks and attempts see the same samples.

    Args:
        root: Local folder, ``s3://bucket/prefix`` or another URL. For tar shards also one
            ``NAME.tar``, or a pattern ``NAME-{000000..000123}.tar``.
        transform: Called with the PIL image (RGB); its result is the first item of a sample.
        target_transform: Called with the class number; its result is the second item.
        on_bad: ``"stop"`` raises an error for an unreadable image, ``"skip"`` uses the next image
            of the same class in its place. Default: the job's ``data.on_bad``.
        cache: Cache for objects of a store. Default: in a run the node's cache (``data.cache``),
            elsewhere none.
        retry_seconds: Seconds to retry while a store does not answer. Default: the job's
            ``data.retry_seconds``.

    Attributes:
        classes (list[str]): Class names, sorted.
        class_to_idx (dict[str, int]): Class name to class number.
        targets (numpy.ndarray): Class number of each sample, int64 of shape [samples].
        groups (numpy.ndarray | None): Number of samples in each shard, int64 of shape [shards];
            None without shards. ``hpcddp.Sampler`` uses it to read a few shards at a time.

    Raises:
        UserError: The root has no images, the bucket or folder does not exist, or reading it is not
            allowed.
        StoreUnreachable: The store did not answer for ``retry_seconds``.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        *,
        on_bad: str | None = None,
        cache: ObjectCache | None = None,
        retry_seconds: float | None = None,
    ) -> None:
        _pillow()
        spec = _data_spec()
        self.on_bad = spec.on_bad if on_bad is None else on_bad
        if self.on_bad not in POLICIES:
            allowed = " or ".join(map(repr, POLICIES))
            raise UserError(f"expected {allowed}, got {self.on_bad!r}", where="on_bad")
        self.transform, self.target_transform = transform, target_transform
        patience = spec.retry_seconds if retry_seconds is None else retry_seconds
        self.root = Place.of(root, patience).root
        above, pattern = folder.split(self.root)
        place = Place.of(above, patience)
        self._listing = listing_of(self.root, lambda: folder.look(place, pattern))
        nodes, cache = rank_of_here().nodes, cache or _cache()
        self._reading = Reading(place, self._listing, cache, nodes)
        self._remote, self._room = place.remote, getattr(cache, "limit", 0)  # bytes
        self.classes = self._listing.classes
        self.class_to_idx = {name: i for i, name in enumerate(self.classes)}
        self.targets = self._listing.labels
        self.groups: NDArray[np.int64] | None = self._listing.groups
        self._reported: set[int] = set()  # unreadable images that were printed

    def __len__(self) -> int:
        return len(self._listing)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """Return the sample at an index as ``(image, class)``.

        Raises:
            IndexError: The index is out of range.
            UserError: The image is unreadable, or with ``on_bad="skip"`` all of its class are.
            StoreUnreachable: The store did not answer in time.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} samples")
        index = int(index) % len(self)
        image: Any = self._image(index)
        target: Any = int(self.targets[index])
        if self.transform is not None:
            image = self.transform(image)
        if self.target_transform is not None:
            target = self.target_transform(target)
        return image, target

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, Any]]:
        """Return several samples; their images are fetched from a store concurrently."""
        if len(indices) == 1 or self._reading.holds(indices):
            return [self[index] for index in indices]
        self.prefetch(indices)
        try:
            return [self[index] for index in indices]
        finally:
            self.prefetch([])

    def prefetch(self, indices: Sequence[int]) -> None:
        """Start to fetch these samples, and drop earlier fetched samples that are not among them.

        Does nothing for local files.
        """
        self._reading.ahead(indices)

    def far(self, *, again: bool) -> bool:
        """Return whether samples come over the network.

        Args:
            again: Answer for a later epoch, when every sample was read once. The node's cache then
                has all samples if they fit into it, each object has a version, and an epoch brings
                all of them to this node. With one image per object, the cache has only the images
                that ranks of this node read.
        """
        listing = self._listing
        versions = [shard.version for shard in listing.shards] or listing.version
        sizes = [shard.size for shard in listing.shards] or listing.size
        known = bool(np.all(versions)) and int(np.min(sizes)) >= 0
        kept = known and int(np.sum(sizes)) <= self._room
        return self._remote and not (again and kept and self._reading.comes_whole)

    def __repr__(self) -> str:
        return f"ImageFolder({self.root!r}): {len(self)} images of {len(self.classes)} classes"

    def _image(self, index: int) -> Any:
        """An image, or with on_bad "skip" another one of its class."""
        try:
            return self._decoded(index)
        except _Bad as bad:
            if self.on_bad == "stop":
                raise UserError(bad.why, where=bad.where, hint=HINT) from None
            self._report(index, bad)
        for other in self._others(index):
            try:
                return self._decoded(other)
            except _Bad as bad:
                self._report(other, bad)
        raise UserError(
            f"all images of class {self.classes[self.targets[index]]!r} are unreadable",
            where=self.root,
            hint="fix or remove the skipped images that the log names",
        )

    def _others(self, index: int) -> Iterator[int]:
        """The other samples of the class, starting with the next one."""
        same = np.flatnonzero(self.targets == self.targets[index])
        at = int(np.searchsorted(same, index))
        yield from map(int, np.roll(same, -at)[1:])

    def _report(self, index: int, bad: _Bad) -> None:
        if index not in self._reported:
            self._reported.add(index)
            print(f"skipped {bad.where}: {bad.why}", file=sys.stderr, flush=True)

    def _decoded(self, index: int) -> Any:
        from PIL import Image

        try:
            data = self._reading(index)
        except ObjectUnreadable as error:
            raise _Bad(error.where, error.what) from None
        try:
            with Image.open(io.BytesIO(data)) as image:
                return image.convert("RGB")
        except (OSError, SyntaxError, ValueError, EOFError, struct.error) as error:
            why = str(error).partition(" <_io.")[0]
        except Image.DecompressionBombError as error:
            why = str(error)
        raise _Bad(self._reading.where(index), f"invalid image: {why}")


class S3ImageFolder(ImageFolder):
    """``ImageFolder`` with the arguments of dask-pytorch-ddp's class of the same name.

    Args:
        s3_bucket: Name of the bucket.
        s3_prefix: Prefix of the class folders; "" for the whole bucket.
        transform: As for ``ImageFolder``.
        target_transform: As for ``ImageFolder``.

    Raises:
        UserError: As ``ImageFolder``.
        StoreUnreachable: As ``ImageFolder``.
    """

    def __init__(
        self,
        s3_bucket: str,
        s3_prefix: str,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
    ) -> None:
        root = f"s3://{s3_bucket.strip('/')}/{s3_prefix.strip('/')}"
        super().__init__(root, transform, target_transform)


class _Bad(Exception):
    """An unreadable image."""

    def __init__(self, where: str, why: str) -> None:
        super().__init__(where, why)
        self.where, self.why = where, why


def _pillow() -> None:
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise UserError(
            "Pillow is not installed; ImageFolder needs it to read images",
            where="hpcddp.data",
            hint=f"install Pillow, or {install_extra('examples')}",
        ) from None


def _data_spec() -> DataSpec:
    """The [data] table of the run's job; the defaults outside a run."""
    spec, run = DataSpec(), run_of_here()
    if run:
        for name, value in record.read(run).spec.get("data", {}).items():
            setattr(spec, name, value)
    return spec


def _cache() -> ObjectCache | None:
    """The node's cache in a run; None outside a run."""
    return shared() if run_of_here() else None
