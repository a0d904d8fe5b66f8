"""Sandbox: start and end a real Slurm on this machine, in one folder."""

import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from hpcddp.errors import SandboxError
from hpcddp.sandbox import daemons, hosts, own_processes
from hpcddp.sandbox.config import SandboxSite, Settings, fits
from hpcddp.sandbox.own_processes import OwnProcess
from hpcddp.sandbox.shell import command, default_folder
from hpcddp.sandbox.state import State, live, load, locked

__all__ = ["Sandbox", "Settings"]

END_SECONDS = 20.0


class Sandbox:
    """The sandbox of a folder. `up` starts it; all other methods read the folder."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = (folder or default_folder()).expanduser().resolve()

    def up(self, settings: Settings | None = None) -> bool:
        """Start it and wait until all nodes are idle; returns False if it is up already.

        What is left of a sandbox that was killed is removed first.

        Raises:
            SandboxError: it cannot start; nothing is left behind.
        """
        settings = settings or Settings()
        daemons.require(settings.accounting)
        with locked(self.folder, create=True):
            state = load(self.folder)
            if state is not None and state.ready and state.alive():
                return False
            if state is not None:
                self._clear(state)
            elif any(self.folder.iterdir()):
                raise SandboxError(
                    "this folder is not empty, and not a sandbox", where=str(self.folder),
                    hint="choose another one with --folder",
                )  # fmt: skip
            self._boot(settings)
        return True

    def down(self) -> bool:
        """End it and remove it; returns False if there is none."""
        with locked(self.folder) as exists:
            state = load(self.folder) if exists else None
            if state is not None:
                self._clear(state)
                self.folder.rmdir()
        if state is None and os.geteuid() == 0:
            hosts.release(self.folder)  # the folder was removed by hand
        return state is not None

    def status(self) -> dict[str, Any]:
        """Its facts: `state` is up, degraded (a daemon is missing), broken (all are) or down."""
        state = load(self.folder)
        if state is None:
            return {"state": "down", "folder": str(self.folder)}
        alive = set(state.alive())
        word = "up" if alive == set(state.daemons) else "degraded"
        return {
            "state": word if state.ready and alive else "broken",
            "folder": str(self.folder),
            "home": state.site.home,
            "accounting": state.settings.accounting,
            "gpus_per_node": state.settings.gpus,
            "own_hostnames": state.site.own_hostnames,
            "nodes": daemons.node_states(state),
            "daemons": {
                name: {"pid": process.pid, "alive": name in alive}
                for name, process in state.daemons.items()
            },
            "environ": _environ(self.folder, state),
        }

    def environ(self) -> dict[str, str]:
        """The variables by which a program finds this Slurm."""
        return _environ(self.folder, self._recorded())

    @property
    def nodes(self) -> list[str]:
        return self._recorded().nodes

    @property
    def logs(self) -> Path:
        """The folder of the logs: slurmctld.log, slurmd-NODE.log and so on."""
        return Path(self._recorded().site.home, "log")

    def stop_daemon(self, name: str, sig: signal.Signals = signal.SIGTERM) -> None:
        """End one daemon, such as `slurmctld` or `slurmd-n1`; jobs continue."""
        with locked(self.folder):
            process = self._recorded().daemons.get(name)
            if process is None:
                raise SandboxError(f"no daemon {name!r}", where=str(self.folder))
            if own_processes.end([process], sig, END_SECONDS):
                raise SandboxError(
                    f"{name} did not end within {END_SECONDS:g} s", where=str(self.folder)
                )

    def daemon(self, name: str) -> OwnProcess:
        """The process of one daemon."""
        return self._recorded().daemons[name]

    def ended(self) -> list[str]:
        """The names of the daemons that do not run."""
        return self._recorded().ended()

    def last_lines(self, name: str) -> str:
        """The last lines of a daemon's log."""
        return daemons.log(self._recorded(), name)

    def start_daemon(self, name: str) -> None:
        """Start a stopped daemon; it may need a moment before it answers."""
        with locked(self.folder):
            state = self._recorded()
            if name not in state.daemons:
                raise SandboxError(f"no daemon {name!r}", where=str(self.folder))
            if not state.daemons[name].alive():
                daemons.start(state, name)
                state.save(self.folder)

    def _recorded(self) -> State:
        state = load(self.folder)
        if state is None:
            raise SandboxError(
                "the sandbox is not up", where=str(self.folder),
                hint=f"start it with `{command(self.folder, 'up')}`",
            )  # fmt: skip
        return state

    def _boot(self, settings: Settings) -> None:
        with ExitStack() as on_failure:
            on_failure.callback(self.folder.rmdir)
            self.folder.chmod(0o700)
            home = self._home()
            prefix = hosts.claim(self.folder, settings.nodes, live)
            state = State(settings, _site(home, prefix, settings.nodes))
            on_failure.callback(self._clear, state)
            state.save(self.folder)
            try:
                daemons.prepare(state)
                daemons.boot(state, lambda: state.save(self.folder))
            except (OSError, subprocess.TimeoutExpired) as error:
                raise SandboxError(
                    f"the sandbox cannot start: {error}", where=str(self.folder)
                ) from error
            state.ready = True
            state.save(self.folder)
            on_failure.pop_all()

    def _home(self) -> Path:
        """The folder of the daemons: this one, or a short one where its path is too long."""
        if fits(self.folder):
            return self.folder
        return Path(tempfile.mkdtemp(prefix="hpcddp-", dir="/tmp"))

    def _clear(self, state: State) -> None:
        """End all its processes and remove its lines and files; the folder itself stays."""
        alive = [process for process in state.daemons.values() if process.alive()]
        helpers = own_processes.descendants([process.pid for process in alive])
        own_processes.end([*alive, *helpers], signal.SIGKILL, END_SECONDS)
        deadline = time.monotonic() + END_SECONDS
        # Repeat until there is none: a process that has just started gets its name late.
        while left := own_processes.of_jobs(state.site.home):
            own_processes.end(left, signal.SIGKILL, 1.0)
            if time.monotonic() > deadline:
                pids = " ".join(str(process.pid) for process in left)
                raise SandboxError(
                    f"these processes do not end: {pids}", where=str(self.folder),
                    hint="end them, then run `hpcddp sandbox down` again",
                )  # fmt: skip
        hosts.release(self.folder)
        if Path(state.site.home) != self.folder:
            shutil.rmtree(state.site.home, ignore_errors=True)
        for entry in self.folder.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def _environ(folder: Path, state: State) -> dict[str, str]:
    return {"SLURM_CONF": state.site.slurm_conf, "HPCDDP_SANDBOX": str(folder)}


def _site(home: Path, prefix: str, nodes: int) -> SandboxSite:
    port = free_ports(2 + nodes)
    return SandboxSite(
        home=str(home),
        host=socket.gethostname().partition(".")[0],
        prefix=prefix,
        ports={"slurmctld": port, "slurmdbd": port + 1, "slurmd": port + 2},
        own_hostnames=_can_set_hostname(),
    )


def free_ports(count: int) -> int:
    """The first of `count` free ports in a row, below the ports that jobs and the kernel use."""
    text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    last = max(min(int(text.split()[0]), 15000) - count, 11000)
    taken = _chosen_ports()
    for _ in range(100):
        first = random.randrange(10000, last)
        ports = range(first, first + count)
        if taken.isdisjoint(ports) and all(_free(port) for port in ports):
            return first
    message = f"no {count} free ports in a row between 10000 and {last}"
    raise SandboxError(message, hint="end another sandbox, or use fewer --nodes")


def _chosen_ports() -> set[int]:
    """Those of the user's sandboxes; one that starts now does not listen yet."""
    chosen: set[int] = set()
    for owner in hosts.owners(hosts.HOSTS.read_text()):
        with suppress(SandboxError):  # another user's
            if (state := load(owner)) is not None:
                first = state.site.ports["slurmctld"]
                chosen.update(range(first, first + 2 + state.settings.nodes))
    return chosen


def _free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


def _can_set_hostname() -> bool:
    """Whether each daemon can have its own host name; some containers forbid it."""
    return subprocess.run(["unshare", "--uts", "true"], capture_output=True).returncode == 0
