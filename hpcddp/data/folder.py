"""A root and the objects below it -> a listing: images in class folders, or else tar shards."""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from hpcddp.data import shards
from hpcddp.data.listing import Listing, Sample, collect
from hpcddp.data.objects import StoreObject
from hpcddp.data.places import Place
from hpcddp.errors import UserError

SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
LAYOUT = f"images are CLASS/NAME.EXT with EXT one of {' '.join(SUFFIXES)}; shards are NAME.tar"
_BRACES = re.compile(r"\{([^{}]*)\}")


def split(root: str) -> tuple[str, str]:
    """A root as the folder that is listed, and the pattern of the shards in it; "" for all."""
    if not (root.endswith(".tar") or "{" in root):
        return root, ""
    folder, _, pattern = root.rpartition("/")
    if "{" in folder:
        raise UserError(
            "has braces in the name of a folder", where=root, hint="only the last name may have"
        )
    return folder or ".", pattern


def expand(pattern: str) -> list[str]:
    """The names that a pattern with {000..012} or {a,b} stands for."""
    braces = _BRACES.search(pattern)
    if not braces:
        return [pattern]
    first, mark, last = braces[1].partition("..")
    words = braces[1].split(",")
    if mark and first.isdecimal() and last.isdecimal():
        numbers = range(int(first), int(last) + 1)
        words = [str(number).zfill(len(first)) for number in numbers]
    head, tail = pattern[: braces.start()], pattern[braces.end() :]
    return list(itertools.chain.from_iterable(expand(head + word + tail) for word in words))


def look(place: Place, pattern: str = "") -> Listing:
    """List a root, now.

    Raises:
        UserError: there is no image and no shard; the error names a remedy.
        StoreUnreachable: the store does not answer for too long.
    """
    if pattern:
        return _shards(place, _named(place, pattern))
    visible = [item for item in place.find() if not _hidden(item.name)]
    images = [item for item in visible if _is_image(item.name)]
    if images:
        _check_classes(place, [item.name for item in visible], [item.name for item in images])
        return _images(place, images)
    if tars := [item for item in visible if fnmatch.fnmatch(item.name, "*.tar")]:
        return _shards(place, tars)
    return _nothing(place, [item.name for item in visible])


def _hidden(name: str) -> bool:
    return name.startswith(".") or "/." in name


def _is_image(name: str) -> bool:
    path, folder = PurePosixPath(name), name.endswith("/")  # "cat/x.jpg/" may be a folder
    return "/" in name and not folder and path.suffix.lower() in SUFFIXES


def _check_classes(place: Place, names: list[str], images: list[str]) -> None:
    """Refuse a class without images: its number would have no sample."""
    full = {name.partition("/")[0] for name in images}
    empty = sorted({name.partition("/")[0] for name in names if "/" in name} - full)
    if empty:
        raise UserError("there is no image in it", where=place.at(empty[0]), hint=LAYOUT)


def _images(place: Place, images: list[StoreObject]) -> Listing:
    classes = sorted({image.name.partition("/")[0] for image in images})
    number = {name: i for i, name in enumerate(classes)}

    def samples() -> Iterator[Sample]:
        for name, size, version in images:
            yield Sample(number[name.partition("/")[0]], -1, 0, size, version, name)

    return collect(place.root, classes, [], samples())


def _named(place: Place, pattern: str) -> list[StoreObject]:
    names = expand(pattern)
    objects = place.named(names)
    missing = [name for name in names if name not in objects]
    if missing:
        raise UserError(
            "there is no such shard" + (f", nor {len(missing) - 1} more" * (len(missing) > 1)),
            where=place.at(missing[0]),
            hint="look at the numbers in the braces" if "{" in pattern else "look at its name",
        )
    return [objects[name] for name in names]


def _shards(place: Place, tars: list[StoreObject]) -> Listing:
    listing = shards.index(place, tars, SUFFIXES)
    if not len(listing):
        raise UserError("there is no image in its shards", where=place.root, hint=shards.LAYOUT)
    return listing


def _nothing(place: Place, names: list[str]) -> Listing:
    folders = sorted({name.partition("/")[0] for name in names if "/" in name})
    reason = "there is no folder of a class in it" if names else "there is nothing below it"
    raise UserError(
        "there is no image in it" if folders else reason,
        where=place.at(folders[0]) if folders else place.root,
        hint=LAYOUT,
    )
