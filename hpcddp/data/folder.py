"""List the samples below a root: images in class folders, or else tar shards."""

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
LAYOUT = f"expected images CLASS/NAME.EXT (EXT: {' '.join(SUFFIXES)}), or shards NAME.tar"
_BRACES = re.compile(r"\{([^{}]*)\}")


def split(root: str) -> tuple[str, str]:
    """Split a root into the folder to list and the pattern of its shards ("" for all files).

    Raises:
        UserError: a folder's name contains braces.
    """
    if not (root.endswith(".tar") or "{" in root):
        return root, ""
    folder, _, pattern = root.rpartition("/")
    if "{" in folder:
        raise UserError(
            "braces are not allowed in a folder's name",
            where=root,
            hint="use braces in the file name only, such as NAME-{000..012}.tar",
        )
    return folder or ".", pattern


def expand(pattern: str) -> list[str]:
    """Expand {000..012} and {a,b} in a pattern, as a shell does."""
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
    """List a root.

    Raises:
        UserError: the root contains neither images nor shards.
        StoreUnreachable: the store did not answer in time.
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
    path, folder = PurePosixPath(name), name.endswith("/")  # a folder may be called "cat/x.jpg/"
    return "/" in name and not folder and path.suffix.lower() in SUFFIXES


def _check_classes(place: Place, names: list[str], images: list[str]) -> None:
    """Refuse a class folder without images: no sample would have the number of that class."""
    full = {name.partition("/")[0] for name in images}
    empty = sorted({name.partition("/")[0] for name in names if "/" in name} - full)
    if empty:
        raise UserError(
            "no images in this class folder",
            where=place.at(empty[0]),
            hint=f"add images or remove the folder; {LAYOUT}",
        )


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
        more = len(missing) - 1
        raise UserError(
            "shard not found" + f" ({more} more missing)" * bool(more),
            where=place.at(missing[0]),
            hint=f"check the {'numbers in the braces' if '{' in pattern else 'name'}",
        )
    return [objects[name] for name in names]


def _shards(place: Place, tars: list[StoreObject]) -> Listing:
    listing = shards.index(place, tars, SUFFIXES)
    if not len(listing):
        raise UserError("no images in the shards", where=place.root, hint=shards.LAYOUT)
    return listing


def _nothing(place: Place, names: list[str]) -> Listing:
    folders = sorted({name.partition("/")[0] for name in names if "/" in name})
    reason = "no class folders found" if names else "no files found"
    raise UserError(
        "no images found" if folders else reason,
        where=place.at(folders[0]) if folders else place.root,
        hint=LAYOUT,
    )
