"""Real Slurms of several generations on this machine, as Debian's releases have them.

Each lies in a folder of its own below SLURMS_ROOT and is used only inside namespaces: mounts,
processes, network, host name and IPC of a release end with the command that runs in it.
"""

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import slurm_overlay

CHECKOUT = Path(__file__).parents[2]
SUITES = {"20.11": "bullseye", "22.05": "bookworm", "24.11": "trixie", "26.05": "sid"}
OVERLAID = {"20.11"}  # its libc is too old for our Python: its programs run on this root instead
HERE = "22.05"  # what scripts/test installs on Debian 12: this root as it is
MORE = {"26.05": ",apptainer"}  # of other releases it does not come with Debian
PACKAGES = "python3,slurm-wlm,slurmctld,slurmd,slurm-client,munge,slurmdbd,mariadb-server,procps"
LAYER = "layer"  # in the folder of an overlaid release
MARK = "hpcddp-slurm.json"  # written last: the folder is complete
PATH = "/usr/bin:/bin:/usr/sbin:/sbin"
GENTLY = ("nice", "-n", "19", "ionice", "-c", "3")
NAMESPACES = ("unshare", "--mount", "--pid", "--ipc", "--net", "--uts", "--fork", "--kill-child")
# If this Python is killed, so is `unshare`, and with it each process in there.
TOGETHER = ("setpriv", "--pdeathsig", "KILL")


class ReleaseError(Exception):
    """Why a release cannot be had, used or removed here."""


def root() -> Path:
    """The folder of all releases."""
    given = os.environ.get("SLURMS_ROOT")
    return Path(given or "~/.cache/hpcddp/slurms").expanduser().absolute()


def folder(version: str) -> Path:
    return root() / version


def state(version: str) -> str:
    """What `list` says of a release."""
    if (mark := folder(version) / MARK).is_file():
        facts = json.loads(mark.read_text())
        if facts.get("packages", PACKAGES) == packages(version):
            return f"ready: Slurm {facts['slurm']}"
        return "set up with other packages: `set-up` makes it anew"
    if version == HERE and here().startswith(f"{HERE}."):
        return f"ready: Slurm {here()}, this machine's own"
    return reason(version) or "not set up"


def packages(version: str) -> str:
    """Debian's packages of a release."""
    return PACKAGES + MORE.get(version, "")


def ready(version: str) -> bool:
    return state(version).startswith("ready")


def reason(version: str) -> str:
    """Why its set-up failed; "" where it did not."""
    try:
        return (root() / f"{version}.reason").read_text().strip()
    except FileNotFoundError:
        return ""


def here() -> str:
    """The version of this machine's own Slurm; "" where there is none."""
    program = shutil.which("slurmd", path=PATH)  # the clients say it only where they have a cluster
    return _version(program) if program else ""


def _version(*slurmd: str) -> str:
    done = subprocess.run([*slurmd, "-V"], capture_output=True, text=True, check=False)
    return done.stdout.rpartition(" ")[2].strip()


def set_up(version: str) -> None:
    """Make a release ready; nothing is done twice.

    Raises:
        ReleaseError: it cannot be had here; its reason is kept, and nothing else.
    """
    if ready(version):
        return
    root().mkdir(parents=True, exist_ok=True)
    with locked(f"{version}.lock", fcntl.LOCK_EX):
        if ready(version):  # another process was first
            return
        why = root() / f"{version}.reason"
        why.unlink(missing_ok=True)
        try:
            _set_up(version)
        except (ReleaseError, OSError, subprocess.CalledProcessError) as error:
            why.write_text(f"{error}\n")
            raise ReleaseError(str(error)) from error


def _set_up(version: str) -> None:
    if version == HERE:
        raise ReleaseError(f"this machine has Slurm {here() or 'of no version'}, not {HERE}")
    if os.geteuid():
        raise ReleaseError("needs root, for namespaces and debootstrap")
    if shutil.which("debootstrap") is None:
        raise ReleaseError("no debootstrap here: `apt-get install debootstrap`")
    new = root() / f"{version}.new"
    clear(new)
    try:
        _bootstrap(version, new)
        slurm = _version("chroot", str(new), "/usr/sbin/slurmd")
        if not slurm.startswith(f"{version}."):
            raise ReleaseError(f"Debian's {SUITES[version]} has Slurm {slurm or 'of no version'}")
        if version in OVERLAID:
            slurm_overlay.make(new, new / LAYER)
        (new / "etc/hosts").touch()  # each run has its own there
        facts = {"slurm": slurm, "suite": SUITES[version], "packages": packages(version)}
        (new / MARK).write_text(json.dumps(facts) + "\n")
        clear(folder(version))
        new.rename(folder(version))
    finally:
        clear(new)


def _bootstrap(version: str, new: Path) -> None:
    # No package may start its daemon.
    policy = new / "usr/sbin/policy-rc.d"
    policy.parent.mkdir(parents=True)
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    config = new / "etc/dpkg/dpkg.cfg.d/hpcddp"
    config.parent.mkdir(parents=True)
    config.write_text("force-unsafe-io\n")  # what is half there after a crash is removed anyway
    made = ["debootstrap", "--variant=minbase", f"--include={packages(version)}",
            SUITES[version], str(new)]  # fmt: skip
    made += mirror()
    private = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
    done = subprocess.run(
        [*GENTLY, *TOGETHER, *private, *made], stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        log = new / "debootstrap/debootstrap.log"
        lines = done.stdout.splitlines()
        if log.is_file():
            lines += log.read_text(errors="replace").splitlines()
        said = [line for line in lines if re.match(r"[EW]: |dpkg: error", line)] or lines
        raise ReleaseError(f"debootstrap of {SUITES[version]}: {' / '.join(said[-3:])}")
    shutil.rmtree(new / "var/cache/apt/archives", ignore_errors=True)


def mirror() -> list[str]:
    """Where this machine's apt gets Debian from; nothing where it does not say."""
    asked = ["apt-get", "indextargets", "--format", "$(REPO_URI)"]
    only = ["Created-By: Packages", "Origin: Debian", "Component: main"]
    try:
        said = subprocess.run([*asked, *only], capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        return []
    return [uri for uri in said.split() if not uri.rstrip("/").endswith("-security")][:1]


@contextmanager
def locked(name: str, how: int) -> Iterator[int]:
    """A lock that ends with its last holder; the number of its open file.

    Raises:
        ReleaseError: another process has it, and `how` says not to wait.
    """
    handle = os.open(root() / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, how)
        yield handle
    except BlockingIOError:
        raise ReleaseError(f"{name.removesuffix('.lock')} is in use now") from None
    finally:
        os.close(handle)


def remove(version: str) -> None:
    """Remove a release, and why it could not be had.

    Raises:
        ReleaseError: it is in use, or has a mount in it; it stays whole then.
    """
    root().mkdir(parents=True, exist_ok=True)
    with locked(f"{version}.lock", fcntl.LOCK_EX | fcntl.LOCK_NB):
        for path in (root() / f"{version}.new", folder(version)):
            clear(path)
        (root() / f"{version}.reason").unlink(missing_ok=True)


def clear(path: Path) -> None:
    """Remove a folder, which must have no mount in it, and nothing of another file system.

    Raises:
        ReleaseError: there is a mount in it, or something of it stays.
    """
    if mounts := mounts_in(path):
        raise ReleaseError(f"{path} has a mount in it: {mounts[0]}; `umount` it first")
    delete(path)


def delete(path: Path) -> None:
    """Remove a folder on its file system alone."""
    (path / MARK).unlink(missing_ok=True)  # from now on it is not complete
    done = subprocess.run(
        ["rm", "-rf", "--one-file-system", "--", str(path)], capture_output=True, text=True
    )
    if done.returncode:
        raise ReleaseError(f"{path} could not be removed: {done.stderr.strip()}")


def mounts_in(path: Path) -> list[str]:
    """The mounts at a folder and below it."""
    text = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    own = str(path.parent.resolve() / path.name)
    points = (_unescaped(line.split()[4]) for line in text.splitlines())
    return [point for point in points if f"{point}/".startswith(f"{own}/")]


def _unescaped(word: str) -> str:
    """A path as the kernel writes it: a blank is \\040."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), word)


def run(version: str, argv: Sequence[str], folders: Sequence[Path] = ()) -> int:
    """Run a command in a release, with this checkout, this Python and these folders.

    Returns its exit code.

    All that it started ends with it. The release itself stays as it is: all that the command
    writes elsewhere than in those folders is gone at its end.

    Raises:
        ReleaseError: the release is not set up.
    """
    stage = root() / "stage"  # where each namespace mounts the root of its own
    stage.mkdir(parents=True, exist_ok=True)
    with locked(f"{version}.lock", fcntl.LOCK_SH) as lock:
        if not ready(version):
            raise ReleaseError(f"{version} is {state(version)}: `scripts/slurms set-up {version}`")
        facts = {
            "source": "/" if version in (HERE, *OVERLAID) else str(folder(version)),
            "layer": str(folder(version) / LAYER) if version in OVERLAID else "",
            "stage": str(stage),
            "folders": sorted({str(path) for path in (*own_folders(), *folders)}),
            "cwd": str(Path.cwd()),
        }
        init = [sys.executable, "-I", str(Path(__file__).with_name("slurm_namespace.py"))]
        command = [*TOGETHER, *NAMESPACES, *init, json.dumps(facts), *argv]
        inside = subprocess.Popen(command, env=environ(), pass_fds=(lock,))
        try:
            return inside.wait()
        finally:
            inside.kill()  # and, by --kill-child, each process in there
            inside.wait()


def own_folders() -> list[Path]:
    """What a command needs of this machine: the checkout, and the Python with its libraries."""
    base = Path(sys.base_prefix)
    if base == Path("/usr"):  # the rest of /usr is the release's
        python = [Path(sys.executable).resolve(), Path(sysconfig.get_path("stdlib"))]
    else:
        python = [base]
    environment = [Path(sys.prefix), *(Path(entry) for entry in sys.path if entry)]
    paths = [CHECKOUT, *python, *environment]
    return [p for p in paths if p.exists() and not any(q in p.parents for q in paths)]


def environ() -> dict[str, str]:
    """This environment without its Slurm, its folders and the paths of programs elsewhere."""
    foreign = ("SLURM_", "SBATCH_", "SQUEUE_", "SINFO_", "HPCDDP_", "XDG_", "PYTEST_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return kept | {"PATH": PATH, "HOME": "/root", "TMPDIR": "/tmp"}
