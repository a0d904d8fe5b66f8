"""Wheels for installations without the network: all that hpcddp needs, and the installers.

torch is linked: its wheel has the facts of the torch that the tests run with, and a path to it.
Anything else that an environment misses is missing there.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from configparser import ConfigParser
from importlib.metadata import distribution
from pathlib import Path

from sites import CHECKOUT

INSTALLERS = ("pip", "pipx", "uv")
CONSTRAINTS = CHECKOUT / "constraints.txt"
HEAVY = ("nvidia", "cuda", "triton")  # what a torch for GPUs asks for, and a linked one has
WHEEL = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def needed() -> list[str]:
    """The requirements of hpcddp but torch, and torch's own."""
    setup = ConfigParser()
    setup.read(CHECKOUT / "setup.cfg")
    own = setup["options"]["install_requires"].split("\n")
    return [line for line in [*own, *torch_needs()] if line and not line.startswith("torch>")]


def torch_needs() -> list[str]:
    """The requirements of the torch that is here, but the libraries that belong to it."""
    lines = distribution("torch").requires or []
    return [x for x in lines if "extra ==" not in x and not x.startswith(HEAVY)]


def filled() -> Path:
    """The folder of the wheels; the first time they are downloaded, into .cache.

    Raises:
        subprocess.CalledProcessError: they cannot be had.
    """
    facts = "\n".join([CONSTRAINTS.read_text(), *needed(), *INSTALLERS, sys.version])
    made = CHECKOUT / ".cache" / f"wheels-{hashlib.sha256(facts.encode()).hexdigest()[:12]}"
    if not made.is_dir():
        made.parent.mkdir(exist_ok=True)
        aside = Path(tempfile.mkdtemp(dir=made.parent))
        try:
            words = ["-q", "-d", aside, "-c", CONSTRAINTS, "--only-binary", ":all:"]
            pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check"]
            subprocess.run([*pip, *words, *needed(), *INSTALLERS], check=True)
            aside.rename(made)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return made


def link_torch(folder: Path) -> None:
    """Write a wheel of the torch that is here, whose only file leads to it."""
    torch = distribution("torch")
    names = (torch.read_text("top_level.txt") or "torch\ntorchgen\nfunctorch").split()
    links = folder / "links"
    links.mkdir()
    for name in names:
        (links / name).symlink_to(str(torch.locate_file(name)))
    lines = ["Metadata-Version: 2.1", "Name: torch", f"Version: {torch.version}"]
    lines += [f"Requires-Dist: {text}" for text in torch_needs()]
    info = f"torch-{torch.version}.dist-info"
    files = {
        "torch_link.pth": f"{links}\n",
        f"{info}/METADATA": "\n".join(lines) + "\n",
        f"{info}/WHEEL": WHEEL,
    }
    record = [f"{name},," for name in [*files, f"{info}/RECORD"]]
    files[f"{info}/RECORD"] = "\n".join(record) + "\n"
    with zipfile.ZipFile(folder / f"torch-{torch.version}-py3-none-any.whl", "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)


def offline(home: Path, *shelves: Path) -> dict[str, str]:
    """An environment in which pip, pipx and uv know these folders and nothing else.

    Args:
        home: of a user who has nothing yet.
    """
    listed = " ".join(map(str, shelves))
    return {
        "HOME": str(home),
        "PATH": "/usr/bin:/bin",
        "TMPDIR": os.environ.get("TMPDIR", "/tmp"),
        "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": listed,
        "PIP_CONSTRAINT": str(CONSTRAINTS), "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIPX_HOME": str(home / "pipx"), "PIPX_BIN_DIR": str(home / "bin"),
        "PIPX_MAN_DIR": str(home / "man"), "PIPX_DEFAULT_PYTHON": sys.executable,
        "UV_NO_CONFIG": "1", "UV_OFFLINE": "1", "UV_NO_INDEX": "1",
        "UV_FIND_LINKS": ",".join(map(str, shelves)), "UV_CONSTRAINT": str(CONSTRAINTS),
        "UV_CACHE_DIR": str(home / "uv-cache"), "UV_TOOL_DIR": str(home / "uv"),
        "UV_TOOL_BIN_DIR": str(home / "bin"), "UV_PYTHON": sys.executable,
        "UV_PYTHON_DOWNLOADS": "never",
    }  # fmt: skip
