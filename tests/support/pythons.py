"""A Python with torch and what torch needs, and without hpcddp: a virtual environment of links."""

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path


def torch_alone(folder: Path) -> Path:
    """A virtual environment with torch alone; its folder."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in sorted(needed("torch")):
        for file in distribution(name).files or []:
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution(name).locate_file(top))))
    return folder


def needed(name: str) -> set[str]:
    """A distribution and those that it requires, as far as they are installed."""
    names, left = set[str](), [name]
    while left:
        own = left.pop()
        try:
            requires = distribution(own).requires or []
        except PackageNotFoundError:  # of another platform
            continue
        names.add(own)
        words = [re.match(r"[\w.-]+", text) for text in requires if "extra ==" not in text]
        left += [word[0] for word in words if word and word[0] not in names]
    return names
