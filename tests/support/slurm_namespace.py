"""The first process of a release's namespaces: it makes their root, and runs one command in it.

The root is a tmpfs with the release's system folders in it, read-only; /tmp, /run, /var/tmp, /root
and /dev/shm are new, so that nothing is shared with other Slurms of this machine, nor left behind.
"""

import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SYSTEM = ("usr", "etc", "var", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
NEW = ("tmp", "run", "root", "home", "mnt", "proc", "sys", "dev", "old")
GET_FLAGS, SET_FLAGS, SET_ADDRESS, UP = 0x8913, 0x8914, 0x8916, 1  # see netdevice(7)
ADDRESS = "192.0.2.1"  # of no real network (RFC 5737)
MNT_DETACH = 2
CONFIG = "etc/slurm"  # 20.11 looks for scripts of plugins here, wherever its slurm.conf is


def main(facts: dict[str, Any], argv: Sequence[str]) -> int:
    loopback()
    stage = Path(facts["stage"])
    build(stage, Path(facts["source"]), facts["layer"], [Path(p) for p in facts["folders"]])
    os.chdir(stage)
    subprocess.run(["pivot_root", ".", "old"], check=True)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(b"/old", MNT_DETACH):
        raise OSError(ctypes.get_errno(), "umount of the old root")
    Path("/old").rmdir()
    os.chdir(facts["cwd"] if Path(facts["cwd"]).is_dir() else "/tmp")
    return attend(argv)


def loopback() -> None:
    """Bring up `lo`, the only interface of a new network namespace, with a second address.

    Where a machine has 127.0.0.1 alone, getaddrinfo(3) with AI_ADDRCONFIG, as Slurm calls it, knows
    no name at all.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", 0)
        _, flags = struct.unpack("16sh14x", fcntl.ioctl(any_socket, GET_FLAGS, request))
        fcntl.ioctl(any_socket, SET_FLAGS, struct.pack("16sh14x", b"lo", flags | UP))
        address = struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(ADDRESS))
        fcntl.ioctl(any_socket, SET_ADDRESS, struct.pack("16s16s", b"lo:1", address))


def build(stage: Path, source: Path, layer: str, folders: Sequence[Path]) -> None:
    """The root of the namespaces, at `stage`."""
    mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", stage)
    for name in NEW:
        (stage / name).mkdir()
    (stage / "tmp").chmod(0o1777)
    system = [name for name in SYSTEM if (source / name).exists()]
    bound = [name for name in system if not (source / name).is_symlink()]
    for name in set(system) - set(bound):
        (stage / name).symlink_to((source / name).readlink())
    for name in bound:
        bind(source / name, stage / name)
    if layer:
        lower = f"lowerdir={layer}/usr:/usr"
        mount("-t", "overlay", "-o", lower, "overlay", stage / "usr")
    for path in folders:
        bind(path, stage / path.relative_to("/"))
    for name in bound:
        mount("-o", "remount,bind,ro", stage / name)
    mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", stage / "var/tmp")
    if (stage / CONFIG).is_dir():
        mount("-t", "tmpfs", "tmpfs", stage / CONFIG)
    devices(stage)
    hosts = stage / "run/hosts"
    hosts.write_text(f"127.0.0.1 localhost\n127.0.0.1 {socket.gethostname()}\n")
    mount("--bind", hosts, stage / "etc/hosts")


def devices(stage: Path) -> None:
    """/proc of these processes; /sys, whose control groups nobody here may change; /dev."""
    mount("-t", "proc", "proc", stage / "proc")
    mount("--rbind", "/sys", stage / "sys")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if f"{line.split()[4]}/".startswith(f"{stage}/sys/"):
            mount("-o", "remount,bind,ro", line.split()[4])
    mount("--rbind", "/dev", stage / "dev")
    mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", stage / "dev/shm")


def bind(source: Path, target: Path) -> None:
    """Show a file or folder at another place too."""
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    mount("--bind", source, target)


def mount(*words: str | Path) -> None:
    done = subprocess.run(["mount", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"mount {' '.join(map(str, words))}: {done.stderr.strip()}")


def attend(argv: Sequence[str]) -> int:
    """Run the command and reap its orphans until it ends; its exit code as a shell tells it."""
    child = os.fork()
    if child == 0:
        try:
            os.execvp(argv[0], argv)
        except OSError as error:
            print(f"{argv[0]}: {error.strerror}", file=sys.stderr)
            os._exit(127)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the command too
    for passed_on in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(passed_on, lambda number, _: os.kill(child, number))
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1]), sys.argv[2:]))
