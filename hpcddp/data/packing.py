"""pack: a folder of images -> tar shards in WebDataset's layout, which are read faster.

TARGET/shard-000000.tar      00000123.jpg, 00000123.cls, ...; the classes are mixed
TARGET/index.json            shard and position of each image, and the class names
"""

from __future__ import annotations

import io
import itertools
import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from hpcddp.data import folder, stores
from hpcddp.data.listing import Listing
from hpcddp.data.places import Place
from hpcddp.data.pool import Pool
from hpcddp.data.shards import FORMAT, INDEX
from hpcddp.errors import UserError
from hpcddp.rundir import write_text
from hpcddp.sizes import bytes_of
from hpcddp.spec import DataSpec

READ_AT_ONCE = 64  # images


def pack(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    size: str | int = "100M",
    *,
    seed: int = 0,
) -> int:
    """Write a folder of images, local or in a store, as tar shards in WebDataset's layout.

    The same images, size and seed give the same bytes. A ``.cls`` file contains the class number;
    only ``index.json`` has the class names, so copy it together with the shards.

    Args:
        source: As the ``root`` of ``ImageFolder``.
        target: New or empty local folder for the shards.
        size: Approximate size of a shard, in bytes or with a unit K, M or G (powers of 1024). A
            larger image gets a shard of its own.
        seed: Random seed of the images' order.

    Returns:
        Number of shards.

    Raises:
        UserError: The source has no images or is not readable, or the target is not a writable
            empty folder.
        StoreUnreachable: The store did not answer in time.
    """
    limit = bytes_of(str(size) or "?", "size", what="shard", bare=isinstance(size, int))
    place, listing = _images_of(source)
    path = _local(target)
    try:
        _make_empty(path)
        return _write(place, listing, path, limit, seed)
    except OSError as error:
        raise UserError(
            f"cannot write the shards: {error.strerror or error}",
            where=error.filename or str(path),
            hint="choose a writable folder on a disk with enough space",
        ) from None


def _images_of(source: str | os.PathLike[str]) -> tuple[Place, Listing]:
    place = Place.of(source, DataSpec().retry_seconds)
    below, pattern = folder.split(place.root)
    listing = folder.look(Place.of(below, place.patience), pattern)
    if listing.shards:
        hint = "read them directly with ImageFolder"
        raise UserError("the source already contains shards", where=place.root, hint=hint)
    return place, listing


def _local(target: str | os.PathLike[str]) -> Path:
    if stores.scheme(os.fspath(target)):
        raise UserError(
            "the target must be a local folder",
            where=os.fspath(target),
            hint="pack into a local folder, and copy that to the store",
        )
    return Path(target).expanduser().absolute()


def _make_empty(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()):
        hint = "choose a new folder"
        raise UserError("the target folder is not empty", where=str(path), hint=hint)


def _write(place: Place, listing: Listing, path: Path, limit: int, seed: int) -> int:
    order = np.random.default_rng(seed).permutation(len(listing))
    shards: list[dict[str, Any]] = []
    images = _images(place, listing, order)
    first = next(images, None)
    while first is not None:
        name = f"shard-{len(shards):06d}.tar"
        shard, first = _shard(path / name, itertools.chain([first], images), limit)
        shards.append({"name": name, "size": (path / name).stat().st_size, **shard})
    index = {"format": FORMAT, "classes": listing.classes, "shards": shards}
    write_text(path / INDEX, json.dumps(index) + "\n")  # last: without it, readers scan the shards
    return len(shards)


Image = tuple[str, int, bytes]  # name in the shard, class number, content


def _images(place: Place, listing: Listing, order: Any) -> Iterator[Image]:
    """The images in their new order; several are fetched concurrently."""
    digits = max(8, len(str(len(order))))
    with Pool(16 if place.remote else 2) as pool:
        for start in range(0, len(order), READ_AT_ONCE):
            samples = [listing[int(i)] for i in order[start : start + READ_AT_ONCE]]
            contents = pool.map(lambda sample: place.read(sample.name), samples)
            for i, (sample, data) in enumerate(zip(samples, contents, strict=True), start):
                suffix = PurePosixPath(sample.name).suffix.lower()
                yield f"{i:0{digits}d}{suffix}", sample.label, data


def _shard(
    path: Path, images: Iterator[Image], limit: int
) -> tuple[dict[str, list[Any]], Image | None]:
    """Write one shard; return its part of the index, and the first image of the next shard."""
    columns: dict[str, list[Any]] = {"names": [], "starts": [], "sizes": [], "labels": []}
    with tarfile.open(path, "x:", format=tarfile.USTAR_FORMAT) as tar:
        for image in images:
            name, label, data = image
            text = str(label).encode()
            if columns["names"] and tar.offset + len(data) + 2048 > limit:
                return columns, image
            _add(tar, PurePosixPath(name).stem + ".cls", text)
            row = {"names": name, "starts": tar.offset + tarfile.BLOCKSIZE}
            _add(tar, name, data)
            for key, value in (row | {"sizes": len(data), "labels": label}).items():
                columns[key].append(value)
    return columns, None


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)  # time, owner and mode are always the same
    tar.addfile(member, io.BytesIO(data))
