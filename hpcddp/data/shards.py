"""List tar shards in WebDataset's layout: the shard, the offset and the size of each image.

Members with the same name up to the first dot are one sample: ``KEY.jpg`` and ``KEY.cls``, which
contains a class number or a class name. Without ``.cls`` the class is the member's first folder.
``pack`` writes the listing into ``index.json`` beside the shards. A class number refers to that
index, also in shards that the index does not list.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from typing import Any

from hpcddp.data.listing import Listing, Sample, collect
from hpcddp.data.objects import StoreObject
from hpcddp.data.places import Place
from hpcddp.data.pool import Pool
from hpcddp.errors import ObjectMissing, UserError

INDEX = "index.json"
FORMAT = 1
LAYOUT = "expected KEY.jpg with KEY.cls, or CLASS/KEY.jpg, in an uncompressed .tar file"
AHEAD = 4 << 20  # bytes of one read
READERS = 8  # threads
CLASS_BYTES = 4096  # limit of a .cls file
# Numbers up to MOST, or SPARSE times the number of classes with samples, count as class numbers.
MOST = 100_000
SPARSE = 10

Piece = tuple[str, int, int, str]  # image name, start and size (bytes), class


def index(place: Place, tars: list[StoreObject], suffixes: tuple[str, ...]) -> Listing:
    """List the samples of these shards."""
    tars = [_measured(place, tar) for tar in tars]
    known, classes = _written(place, tars)
    rest = [tar for tar in tars if tar.name not in known]
    with Pool(READERS) as pool:
        read = pool.map(lambda tar: list(_pieces(place, tar, suffixes, classes)), rest)
        pieces = known | {tar.name: own for tar, own in zip(rest, read, strict=True)}
    classes = classes if not rest else _classes(pieces.values(), classes)
    number = {name: i for i, name in enumerate(classes)}
    full = [tar for tar in tars if pieces[tar.name]]

    def samples() -> Iterator[Sample]:
        for i, shard in enumerate(full):
            for name, start, size, label in pieces[shard.name]:
                yield Sample(number[label], i, start, size, 0, name)

    return collect(place.root, classes, full, samples())


def _measured(place: Place, tar: StoreObject) -> StoreObject:
    """A shard with its size, which the listing of a folder does not have."""
    if place.remote or tar.size >= 0:
        return tar
    with place.open(tar.name) as file:
        return tar._replace(size=os.fstat(file.fileno()).st_size)


def _written(place: Place, tars: list[StoreObject]) -> tuple[dict[str, list[Piece]], list[str]]:
    """The samples of these shards by the index beside them, and the classes of the index."""
    try:
        data = json.loads(place.read(INDEX))
        if data["format"] != FORMAT:
            raise ValueError(f"expected format {FORMAT}, got {data['format']!r}")
        names: list[str] = data["classes"]
        known = {}
        for shard in data["shards"]:
            rows = zip(*(shard[k] for k in ("names", "starts", "sizes", "labels")), strict=True)
            known[shard["name"]] = (
                shard["size"],
                [(name, start, size, names[label]) for name, start, size, label in rows],
            )
    except ObjectMissing:
        return {}, []
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise UserError(
            f"invalid index of shards: {error}",
            where=place.at(INDEX),
            hint="delete it: hpcddp then scans the shards",
        ) from None
    # A shard that was rewritten has another size: it is scanned.
    same = {n: known[n][1] for n, size, _ in tars if n in known and size in (-1, known[n][0])}
    return same, names


def _classes(pieces: Iterable[list[Piece]], known: list[str]) -> list[str]:
    """The classes in the order of their numbers.

    If all labels are numbers they are class numbers, except where they are so large that they can
    only be names.
    """
    labels = {label for shard in pieces for *_, label in shard}
    if known and labels <= set(known):
        return known
    if not labels or not all(label.isdecimal() for label in labels):
        return sorted(labels)
    count = max(map(int, labels)) + 1
    if count > max(MOST, SPARSE * len(labels)):
        return sorted(labels, key=int)
    return [str(i) for i in range(count)]


def _pieces(
    place: Place, shard: StoreObject, suffixes: tuple[str, ...], classes: list[str]
) -> Iterator[Piece]:
    """The samples in a shard by its members' headers. ``classes`` are those of the index."""
    name = shard.name
    images: dict[str, tarfile.TarInfo] = {}
    labels: dict[str, str] = {}
    try:
        with tarfile.open(fileobj=opened(place, name, shard.size), mode="r:") as tar:
            for member in tar:
                key, suffix = _parts(member.name)
                if not member.isreg() or _hidden(key):
                    continue
                if suffix == ".cls":
                    labels[key] = _class(_label(place, name, tar, member), place, name, classes)
                elif PurePosixPath(member.name).suffix.lower() in suffixes:
                    images.setdefault(key, member)
    except tarfile.TarError as error:
        raise UserError(f"invalid tar file: {error}", where=place.at(name), hint=LAYOUT) from None
    for key, member in images.items():
        label = labels.get(key) or key.removeprefix("./").rpartition("/")[0].partition("/")[0]
        if not label:
            raise UserError(f"{member.name} has no class", where=place.at(name), hint=LAYOUT)
        yield member.name, member.offset_data, member.size, label


def _hidden(key: str) -> bool:
    return key.rpartition("/")[2] == ""  # the name begins with a dot


def _parts(name: str) -> tuple[str, str]:
    """A member's key, and its suffix from the first dot on."""
    folder, slash, base = name.rpartition("/")
    stem, dot, rest = base.partition(".")
    return folder + slash + stem, dot + rest


def _label(place: Place, name: str, tar: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    file = tar.extractfile(member)
    text = file.read(CLASS_BYTES) if file else b""
    label = text.decode("utf-8", "replace").strip()
    if not label or "\n" in label or member.size > CLASS_BYTES:
        raise UserError(
            f"{member.name} contains neither a class number nor a class name",
            where=place.at(name),
            hint=LAYOUT,
        )
    return str(int(label)) if label.isdecimal() else label


def _class(label: str, place: Place, name: str, classes: list[str]) -> str:
    """Translate a class number to the class name of the index, if there is an index."""
    if not (classes and label.isdecimal()):
        return label
    if int(label) >= len(classes):
        raise UserError(
            f"class {label} is not in {INDEX}, which has {len(classes)} classes",
            where=place.at(name),
            hint=f"pack all images again, or delete {INDEX}: each number is then a class",
        )
    return classes[int(label)]


def opened(place: Place, name: str, size: int) -> io.BufferedReader:
    """An object of ``size`` bytes as a seekable file, read in large blocks."""
    return io.BufferedReader(_Ranges(place, name, size), AHEAD)


class _Ranges(io.RawIOBase):
    """An object of a store as an unbuffered file."""

    def __init__(self, place: Place, name: str, size: int) -> None:
        self._place, self._name, self._size, self._at = place, name, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._size - self._at))
        if count:
            buffer[:count] = self._place.read(self._name, self._at, count)
            self._at += count
        return count
