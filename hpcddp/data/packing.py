"""pack: a folder of images -> tar shards in WebDataset's layout, which are read faster.

TARGET/shard-000000.tar      00000123.jpg, 00000123.cls, ...; the classes are mixed
TARGET/index.json            where in which shard each image is, and the classes' names
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
    """Write a folder of images, local or in a store, as tar shards; how many there are.

    The same images, size and seed give the same bytes. Put the shards where they are to be read
    from with the store's own tools, ``index.json`` too: ``.cls`` has the numbers of the classes, in
    the order of their names, and the index alone the names.

    Args:
        source: as ImageFolder's root.
        target: a folder, which is made; it must not hold anything.
        size: of a shard, about: bytes, or with K, M or G (of 1024). A larger image has one for
            itself.
        seed: of the order.

    Raises:
        UserError: nothing can be read there, or written here.
    """
    limit = bytes_of(str(size) or "?", "size", what="a shard")
    place = Place.of(source, DataSpec().retry_seconds)
    below, pattern = folder.split(place.root)
    listing = folder.look(Place.of(below, place.patience), pattern)
    if listing.shards:
        raise UserError("holds shards already", where=place.root, hint="read it as it is")
    path = _local(target)
    try:
        _make_empty(path)
        return _write(place, listing, path, limit, seed)
    except OSError as error:
        raise UserError(
            f"cannot be written: {error.strerror or error}",
            where=error.filename or str(path),
            hint="name a folder on a disk that has room",
        ) from None


def _local(target: str | os.PathLike[str]) -> Path:
    if stores.scheme(os.fspath(target)):
        raise UserError(
            "is no local folder",
            where=os.fspath(target),
            hint="pack into one, and copy that to the store",
        )
    return Path(target).expanduser().absolute()


def _make_empty(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()):
        raise UserError("is not empty", where=str(path), hint="name a new folder")


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
    write_text(path / INDEX, json.dumps(index) + "\n")  # last: without it the shards are read
    return len(shards)


Image = tuple[str, int, bytes]  # its name in the shard, the number of its class, its bytes


def _images(place: Place, listing: Listing, order: Any) -> Iterator[Image]:
    """The images in their new order, some of them fetched at the same time."""
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
    """Write one shard; its part of the index, and the first image that has no room in it."""
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
