"""What a process can tell of its own machine, with the standard library alone."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import resource
import shutil
import socket
import statistics
import struct
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hpcddp.attempt import error_record

TIMEOUT = 15.0  # seconds for a program of the driver
SILENT = "no answer in time"  # of a GPU driver, which may only be slow
TRIES = 16  # files of the test of a folder
PAGE = b"x" * 4096
SIOCGIFADDR = 0x8915  # netdevice(7)
REACH = 3.0  # seconds to connect to a host
KFD = Path("/sys/class/kfd/kfd/topology/nodes")  # AMD's driver: a node with SIMDs is a GPU
GPU_FIELDS = {
    "name": "name",
    "uuid": "uuid",
    "driver": "driver_version",
    "memory_mb": "memory.total",
    "ecc_errors": "ecc.errors.uncorrected.volatile.total",
    "temperature": "temperature.gpu",  # degrees Celsius
    "throttle": "clocks_throttle_reasons.active",  # bits, see THROTTLE
}
# Bits of nvidia-smi's clocks_throttle_reasons.active (NVML, nvmlClocksEventReasons) that say that
# a GPU cannot run at its speed. Idle, a user's clocks and the power cap are no faults.
THROTTLE = {
    0x08: "hardware slowdown",
    0x20: "too hot (software)",
    0x40: "too hot (hardware)",
    0x80: "power brake",
}


def read(folder: Path) -> dict[str, Any]:
    """The facts of this machine.

    Args:
        folder: where runs lie.
    """
    return {
        "host": error_record.host(),
        "architecture": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "home": Path("~").expanduser().is_dir(),
        "open_files": _limit(resource.RLIMIT_NOFILE),
        "locked_memory": _limit(resource.RLIMIT_MEMLOCK),
        "folder": space(folder),
        "tmp": space(Path("/tmp")),
        "interfaces": dict(interfaces()),
        "gpus": gpus(),
    }


def _limit(which: int) -> int | None:
    """The limit of this process; None for no limit."""
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def space(folder: Path) -> dict[str, int]:
    """What a file system has left for the user: bytes and files; 0 files where it does not count
    them."""
    try:
        stat = os.statvfs(folder)
    except OSError:
        return {}
    return {
        "free": stat.f_bavail * stat.f_frsize, "size": stat.f_blocks * stat.f_frsize,
        "free_files": stat.f_favail, "files": stat.f_files,
    }  # fmt: skip


def interfaces(root: Path = Path("/sys/class/net")) -> Iterator[tuple[str, int]]:
    """The network interfaces that are up, with their speed in Mbit/s; 0 if unknown."""
    for path in sorted(root.glob("*")) if root.is_dir() else ():
        if path.name == "lo" or _text(path / "operstate") == "down":
            continue
        speed = _text(path / "speed")
        yield path.name, int(speed) if speed.isdecimal() else 0


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def gpus() -> list[dict[str, Any]]:
    """The NVIDIA GPUs that this process can ask about; none without nvidia-smi."""
    return gpu_query()[0] or []


def gpu_query(ids: Sequence[str] = ()) -> tuple[list[dict[str, Any]] | None, str]:
    """What nvidia-smi says of each GPU, and why it fails; (None, "") if it is not installed.

    Args:
        ids: indices or UUIDs of some GPUs, for these alone.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return None, ""
    fields = ",".join(GPU_FIELDS.values())
    command = [program, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    command += [f"--id={','.join(ids)}"] if ids else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return None, SILENT
    except OSError as error:
        return None, str(error)
    if done.returncode:
        said = (done.stdout + done.stderr).strip() or f"exit code {done.returncode}"
        return None, said.splitlines()[-1]
    cells = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [dict(zip(GPU_FIELDS, row)) for row in cells if len(row) == len(GPU_FIELDS)], ""  # noqa: B905


def gpu_count(rows: Sequence[dict[str, Any]] | None) -> int | None:
    """GPUs of this machine that a process sees; None without a driver that tells.

    Args:
        rows: what nvidia-smi says; None if nothing.
    """
    if rows is not None:
        return len(rows)
    if not KFD.is_dir():
        return None
    return sum("simd_count 0" not in _text(node / "properties") for node in KFD.glob("*"))


def memory_errors(gpu: dict[str, Any]) -> int:
    """Uncorrected memory errors of a GPU; 0 if it does not count them."""
    errors = str(gpu.get("ecc_errors", ""))
    return int(errors) if errors.isdecimal() else 0


def throttled(gpu: dict[str, Any]) -> list[str]:
    """Why a GPU does not run at its speed; empty if it does, or does not say."""
    try:
        bits = int(str(gpu.get("throttle", "")), 16)
    except ValueError:
        return []
    return [text for bit, text in THROTTLE.items() if bits & bit]


def write_times(folder: Path) -> dict[str, float]:
    """The median and the longest time, in seconds, to write 4 KB, fsync and rename a file."""
    times = []
    aside, target = folder / f".doctor-{os.getpid()}", folder / f"doctor-{os.getpid()}"
    try:
        for _ in range(TRIES):
            begin = time.perf_counter()
            with aside.open("wb") as file:
                file.write(PAGE)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(target)
            times.append(time.perf_counter() - begin)
    finally:
        aside.unlink(missing_ok=True)
        target.unlink(missing_ok=True)
    return {"median": statistics.median(times), "longest": max(times)}


def reachable(host: str, port: int) -> str:
    """Why a host cannot be reached from here; "" if it can."""
    try:
        socket.create_connection((host, port), timeout=REACH).close()
    except OSError as error:
        return str(error.strerror or error)
    return ""


def route_to(host: str) -> str:
    """The address of this machine on the way to a host; "" if there is none. Nothing is sent."""
    try:
        kind, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def interface_of(address: str) -> str:
    """The network interface with an IPv4 address; "" if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(asked, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""
