"""Small images for tests, whose first pixel tells which one it is."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

CLASSES = {"cat": 7, "dog": 5, "größe 数": 4}


def picture(number: int, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (8, 8), (number % 256, number // 256, 77)).save(out, kind)
    return out.getvalue()


def number_of(image: Any) -> int:
    """Which picture an image is."""
    red, green, blue = image.getpixel((0, 0))
    assert blue == 77 and image.mode == "RGB"
    return int(red + 256 * green)


def pictures(classes: Mapping[str, int] = CLASSES, prefix: str = "") -> dict[str, bytes]:
    """Names and contents, numbered in the order of a listing. Some lie deeper, and some of what is
    there is no image."""
    found: dict[str, bytes] = {}
    for name, count in sorted(classes.items()):
        for i in range(count):
            deeper = "deep/er/" if i >= count - 2 else ""
            found[f"{prefix}{name}/{deeper or 'a'}{i:03} ü.png"] = picture(len(found))
    return found | {
        f"{prefix}{name}": b"no image" for name in ("README.md", "cat/notes.txt", ".hid/1.png")
    }


def put(folder: Path, objects: Mapping[str, bytes]) -> Path:
    """The same as files."""
    for name, data in objects.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def numbers(dataset: Any) -> list[tuple[int, int]]:
    """Which pictures a dataset has, and of which class."""
    return [
        (number_of(image), target)
        for image, target in map(dataset.__getitem__, range(len(dataset)))
    ]
