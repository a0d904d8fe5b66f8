"""An older Slurm's programs over this machine's /usr, with the libraries that it lacks.

A program runs with a libc that is newer than its own, but not with an older one. So the programs of
an old release run here, where our Python runs too.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("slurm-client", "slurmctld", "slurmd", "slurmdbd")
PLUGINS = "slurm-wlm"  # the folder of Debian's plugins, below that of libraries


def make(release: Path, layer: Path) -> None:
    """Put what belongs over /usr into `layer/usr`.

    Raises:
        subprocess.CalledProcessError: a program of the release cannot be asked.
    """
    (plugins,) = release.glob(f"usr/lib/*/{PLUGINS}")
    over = layer / plugins.relative_to(release)
    shutil.copytree(plugins, over, symlinks=True)
    os.setxattr(over, "trusted.overlay.opaque", b"y")  # or this machine's plugins are loaded too
    for program in _programs(release):
        # Some are links by way of /etc/alternatives, which is this machine's.
        real = _say(release, "readlink", "-f", program).strip()
        target = layer / program.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(release / real.lstrip("/"), target)
    here = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
    known = {line.split()[0] for line in here.splitlines() if "=>" in line}
    for name, path in _libraries(release, layer):
        if name not in known and not (over / name).exists():
            shutil.copy2(release / path.lstrip("/"), over.parent / name)


def _programs(release: Path) -> list[str]:
    files = _say(release, "dpkg", "--listfiles", *PACKAGES).splitlines()
    named = {path.removesuffix("-wlm") for path in files}
    return sorted(
        path
        for path in named
        if Path(path).parent in (Path("/usr/bin"), Path("/usr/sbin"))
        and not (release / path.lstrip("/")).is_dir()
    )


def _libraries(release: Path, layer: Path) -> Iterator[tuple[str, str]]:
    """Each library that these programs and plugins load: its name, and its file in the release."""
    files = [f"/{path.relative_to(layer)}" for path in layer.rglob("*") if _is_elf(path)]
    said = subprocess.run(
        ["chroot", str(release), "ldd", *files], capture_output=True, text=True, check=False
    ).stdout  # a plugin that is linked to nothing makes its exit code 1
    for line in said.splitlines():
        name, arrow, rest = line.strip().partition(" => ")
        if arrow and rest.startswith("/"):
            yield name, _say(release, "readlink", "-f", rest.split()[0]).strip()


def _is_elf(path: Path) -> bool:
    if not path.is_file() or path.is_symlink():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def _say(release: Path, *argv: str) -> str:
    return subprocess.run(
        ["chroot", str(release), *argv], capture_output=True, text=True, check=True
    ).stdout
