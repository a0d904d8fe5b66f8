"""The folders of the shipped templates and jobs: top-level folders that belong to the package."""

from importlib import import_module
from pathlib import Path


def folder(name: str) -> Path:
    """The folder `templates` or `jobs`; the same from a checkout and from an installed package."""
    return Path(import_module(f"hpcddp.{name}").__path__[0])
