"""What the reference of the Python API shows of the code, beside what autodoc reads."""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx

from hpcddp.train.input.sampler import ResumableSampler

# Only hpcddp makes objects of these classes: their arguments are no part of the API.
MADE = ("hpcddp.Run", "hpcddp.train.rank.world.World", "hpcddp.dask.Ranks")


def no_arguments(app: Sphinx, kind: str, name: str, *rest: Any) -> tuple[str, str] | None:
    return ("", "") if kind == "class" and name in MADE else None


def no_description_of_them(
    app: Sphinx, kind: str, name: str, thing: object, options: object, lines: list[str]
) -> None:
    if kind == "class" and name in MADE and "Args:" in lines:
        del lines[lines.index("Args:") :]


def setup(app: Sphinx) -> None:
    ResumableSampler.__name__ = "Sampler"  # else autodoc says only of which class it is an alias
    app.connect("autodoc-process-signature", no_arguments)
    app.connect(
        "autodoc-process-docstring", no_description_of_them, priority=400
    )  # before napoleon
