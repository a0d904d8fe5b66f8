"""Sandbox: the daemons, the command of each, and the check that it is ready."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from hpcddp.errors import SandboxError
from hpcddp.sandbox import config, own_processes
from hpcddp.sandbox.own_processes import tail
from hpcddp.sandbox.state import State

PACKAGES = "apt-get install slurm-wlm slurmctld slurmd slurm-client munge slurmdbd mariadb-server"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sinfo", "sbatch", "srun", "unshare")
ACCOUNTING_PROGRAMS = ("slurmdbd", "sacctmgr", "mariadbd", "mariadb-install-db")
SEARCH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin:/usr/sbin:/sbin"])
BOOT_SECONDS = 60.0


def require(accounting: bool) -> None:
    """Check that a sandbox can run here.

    Raises:
        SandboxError: programs are missing, or the user is not root.
    """
    wanted = PROGRAMS + (ACCOUNTING_PROGRAMS if accounting else ())
    missing = [name for name in wanted if shutil.which(name, path=SEARCH) is None]
    root = os.geteuid() == 0
    if not root:
        message = "the sandbox needs root"
        hint = "run it as root, for example in a container"
        hint += f", after `{PACKAGES}`" if missing else ""
        raise SandboxError(
            message, hint=f"{hint}; `hpcddp submit --cluster local` trains without Slurm"
        )
    if missing:
        message = f"Slurm is not completely installed here: no {', '.join(missing)}"
        raise SandboxError(message, hint=f"`{PACKAGES}`")


def command(state: State, name: str) -> list[str]:
    """The argument list of a daemon."""
    home = state.site.home
    if name.startswith("slurmd-"):
        return [_find("slurmd"), "-D", "-N", name.removeprefix("slurmd-")]
    table = {
        "munged": [
            "--foreground",
            "--force",
            f"--key-file={home}/munge.key",
            f"--socket={home}/munge.sock",
            f"--pid-file={home}/munged.pid",
            f"--log-file={home}/log/munged.log",
            f"--seed-file={home}/munge.seed",
        ],
        "mariadbd": [
            "--no-defaults",
            "--user=root",
            f"--datadir={home}/mysql",
            f"--socket={home}/mysql.sock",
            f"--pid-file={home}/mariadbd.pid",
            "--skip-networking",
        ],
        "slurmdbd": ["-D"],
        "slurmctld": ["-D"],
    }
    return [_find(name), *table[name]]


def start(state: State, name: str) -> None:
    """Start one daemon and record it, without waiting until it is ready."""
    node = name.removeprefix("slurmd-")
    host = node if node in state.nodes else state.site.controller_name
    hostname = host if state.site.own_hostnames else ""
    output = Path(state.site.home, "log", f"{name}.out")
    argv = command(state, name)
    state.daemons[name] = own_processes.start(argv, environ(state), output, hostname)


def boot(state: State, save: Callable[[], None]) -> None:
    """Start all daemons in the order of their needs, and wait until every node is idle."""

    def bring(name: str) -> None:
        start(state, name)
        save()

    home, ports = state.site.home, state.site.ports
    bring("munged")
    if state.settings.accounting:
        _run(state, "mariadb-install-db", *_install_options(home))
        bring("mariadbd")
        _wait(state, "mariadbd", lambda: _answers(f"{home}/mysql.sock"))
    _wait(state, "munged", lambda: _answers(f"{home}/munge.sock"))
    if state.settings.accounting:
        bring("slurmdbd")
        _wait(state, "slurmdbd", lambda: _answers((config.ADDRESS, ports["slurmdbd"])))
        _run(state, "sacctmgr", "-i", "add", "cluster", "sandbox")
    bring("slurmctld")
    _wait(state, "slurmctld", lambda: _answers((config.ADDRESS, ports["slurmctld"])))
    for node in state.nodes:
        bring(f"slurmd-{node}")
    _wait(state, "slurmctld", lambda: set(node_states(state).values()) == {"idle"})


def node_states(state: State) -> dict[str, str]:
    """Node -> state as sinfo prints it; `unknown` where the controller does not answer."""
    states = dict.fromkeys(state.nodes, "unknown")
    if "slurmctld" not in state.alive():  # sinfo would wait for a long time
        return states
    argv = [_find("sinfo"), "--noheader", "--Node", "--partition=low", "--format=%N %T"]
    try:
        done = subprocess.run(
            argv, env=environ(state), capture_output=True, text=True, timeout=10, check=False
        )
    except subprocess.TimeoutExpired:
        return states
    return states | dict(line.split(maxsplit=1) for line in done.stdout.splitlines())


def environ(state: State) -> dict[str, str]:
    """The daemons' environment, without that of the shell or job that called `up`."""
    return {
        "PATH": SEARCH,
        "HOME": os.environ.get("HOME", "/root"),
        "LANG": "C.UTF-8",
        "SLURM_CONF": f"{state.site.home}/daemons.conf",
        "MYSQL_UNIX_PORT": f"{state.site.home}/mysql.sock",  # where slurmdbd looks
    }


def prepare(state: State) -> None:
    """The folders, keys, devices and configuration files, before the first daemon starts."""
    home = Path(state.site.home)
    for name in ("log", "spool", "state", "dev"):
        (home / name).mkdir()
    _private(home / "munge.key", os.urandom(1024))
    for gpu in range(state.settings.gpus):  # a /dev/null each: Slurm only counts and assigns them
        os.mknod(home / "dev" / f"nvidia{gpu}", 0o020666, os.makedev(1, 3))
    for name, text in config.files(state.site, state.settings).items():
        _private(home / name, text.encode())


def _install_options(home: str) -> list[str]:
    options = ["--no-defaults", "--user=root", f"--datadir={home}/mysql", "--skip-test-db"]
    return [*options, "--auth-root-authentication-method=socket"]


def _private(path: Path, content: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(handle, "wb") as file:
        file.write(content)


def _find(program: str) -> str:
    return shutil.which(program, path=SEARCH) or program


def _run(state: State, *argv: str) -> None:
    done = subprocess.run(
        [_find(argv[0]), *argv[1:]],
        env=environ(state),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=BOOT_SECONDS,
        check=False,
    )
    if done.returncode:
        output = (done.stdout + done.stderr).strip()
        raise SandboxError(f"{argv[0]} failed with exit code {done.returncode}", hint=output)


def _answers(address: str | tuple[str, int]) -> bool:
    """Whether a process listens at this path, or at this host and port."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with socket.socket(family) as probe:
        probe.settimeout(5)
        return probe.connect_ex(address) == 0


def _wait(state: State, name: str, ready: Callable[[], bool]) -> None:
    """Wait until a daemon is ready.

    Raises:
        SandboxError: a daemon ended meanwhile, or it took too long.
    """
    deadline = time.monotonic() + BOOT_SECONDS
    while not ready():
        if ended := state.ended():
            message = f"{ended[0]} ended during its start; its last lines follow"
            raise SandboxError(message, hint=log(state, ended[0]))
        if time.monotonic() > deadline:
            message = f"{name} is not ready after {BOOT_SECONDS:.0f} s; its last lines follow"
            raise SandboxError(message, hint=log(state, name))
        time.sleep(0.02)


def log(state: State, name: str) -> str:
    """The last lines of a daemon's log or of its output: of that to which it has written last."""
    folder = Path(state.site.home, "log")
    files = [path for end in ("out", "log") if (path := folder / f"{name}.{end}").exists()]
    written = sorted(files, key=lambda path: path.stat().st_mtime_ns, reverse=True)
    return next((lines for path in written if (lines := tail(path))), "")
