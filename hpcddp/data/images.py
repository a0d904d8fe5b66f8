"""ImageFolder: images by class as a map-style dataset, from a folder or a store.

ROOT/CLASS/NAME.jpg          a folder, s3://bucket/prefix, or any URL that fsspec knows
ROOT/NAME-000000.tar         the same in tar shards (see shards.py), which are read faster
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
from hpcddp.errors import ObjectUnreadable, UserError
from hpcddp.spec import DataSpec

POLICIES = ("stop", "skip")
HINT = 'mend it, or take it away; data.on_bad = "skip" takes another one of its class'


class ImageFolder(Dataset[tuple[Any, Any]]):
    """(image, class) by index, sorted by class and name; the class is the first folder below root.

    Args:
        root: local folder, ``s3://bucket/prefix`` or another URL; of shards also one ``NAME.tar``
            or ``NAME-{000000..000123}.tar``.
        transform: of the PIL image, in RGB.
        target_transform: of the number of the class.
        on_bad: "stop" at an image that cannot be read, or "skip" it for the next one of its class.
            The default is that of the run's job, as with the next two.
        cache: keeps objects of a store near; see reading.ObjectCache.
        retry_seconds: for which a store may be silent.

    Attributes:
        classes: their names, sorted.
        class_to_idx: their numbers.
        targets: the number of each sample's class, int64 of shape [samples].
        groups: how many samples each shard has; None without shards. A sampler that goes by it
            (hpcddp's does) reads a few shards at a time.

    Raises:
        UserError: there are no images, no such bucket or folder, or no right to read them.
        StoreUnreachable: the store does not answer for too long.
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
            raise UserError(f"{on_bad!r} is not one of {', '.join(POLICIES)}", where="on_bad")
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
        self._reported: set[int] = set()  # bad images that were printed

    def __len__(self) -> int:
        return len(self._listing)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"{index} of {len(self)} samples")
        index = int(index) % len(self)
        image: Any = self._image(index)
        target: Any = int(self.targets[index])
        if self.transform is not None:
            image = self.transform(image)
        if self.target_transform is not None:
            target = self.target_transform(target)
        return image, target

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, Any]]:
        """A batch, whose images are fetched at the same time."""
        if len(indices) == 1 or self._reading.holds(indices):
            return [self[index] for index in indices]
        self.prefetch(indices)
        try:
            return [self[index] for index in indices]
        finally:
            self.prefetch([])

    def prefetch(self, indices: Sequence[int]) -> None:
        """Begin to fetch the samples that come next, and drop earlier ones that are not among them.
        For local files it does nothing."""
        self._reading.ahead(indices)

    def far(self, *, again: bool) -> bool:
        """Whether its samples come from a store; ``again``: after all of it was read once.

        Then the node's cache has it, where all of it fits and each object has a version. Of images
        that are objects of their own it has only those that this node's ranks have read.
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
        """An image, or another one of its class if it cannot be read."""
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
            f"no image of the class {self.classes[self.targets[index]]} can be read",
            where=self.root,
            hint="look at the images that were named before",
        )

    def _others(self, index: int) -> Iterator[int]:
        """The other samples of a class, from the next one on."""
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
        raise _Bad(self._reading.where(index), f"cannot be read as an image: {why}")


class S3ImageFolder(ImageFolder):
    """ImageFolder with the arguments that dask-pytorch-ddp's has."""

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
    """An image that cannot be read."""

    def __init__(self, where: str, why: str) -> None:
        super().__init__(where, why)
        self.where, self.why = where, why


def _pillow() -> None:
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise UserError(
            "images are read with Pillow, which is not here",
            where="hpcddp.data",
            hint="pip install pillow",
        ) from None


def _data_spec() -> DataSpec:
    """The table [data] of the run's job; outside of a run the defaults."""
    spec, run = DataSpec(), run_of_here()
    if run:
        for name, value in record.read(run).spec.get("data", {}).items():
            setattr(spec, name, value)
    return spec


def _cache() -> ObjectCache | None:
    """The node's cache, in a run."""
    return shared() if run_of_here() else None
