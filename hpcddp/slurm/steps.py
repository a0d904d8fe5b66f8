"""srun into a running job: a step that shares its nodes with the ranks (`--overlap`)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import NoReturn

from hpcddp.errors import SlurmMissing
from hpcddp.slurm import other_clusters
from hpcddp.slurm.commands import check_sandbox
from hpcddp.slurm.environment import clean

KILL_WAIT = 5.0  # seconds between TERM and KILL of an srun that does not return
# On a node: host.pyz with this Python, if the node has it, or with its own.
_RUN = 'python=$1; shift; command -v "$python" >/dev/null || python=python3; exec "$python" -I "$@"'


def on_node(archive: str, *words: str) -> list[str]:
    """The command on a node that runs host.pyz with these words."""
    return ["/bin/sh", "-c", _RUN, "sh", sys.executable, archive, *words]


def step(
    job_id: str, hosts: str, nodes: int, command: Sequence[str], release: str = ""
) -> list[str]:
    """The srun of a step with one task on each of these nodes of a job. It takes nothing that the
    ranks hold, so it does not wait for them (srun(1), --mem and --gres).

    Args:
        release: of Slurm, if known.
    """
    return [
        "srun", f"--jobid={job_id}", "--overlap", f"--nodelist={hosts}", f"--nodes={nodes}",
        f"--ntasks={nodes}", "--ntasks-per-node=1", "--cpus-per-task=1", "--mem=0",
        *([] if _shares_gpus(release) else ["--gres=none"]), "--mpi=none", "--kill-on-bad-exit=0",
        "--chdir=/", *command,
    ]  # fmt: skip


def _shares_gpus(release: str) -> bool:
    """Whether --overlap shares GPUs too, as it does since Slurm 22.05."""
    number = re.match(r"(\d+)\.(\d+)", release)
    return not number or (int(number[1]), int(number[2])) >= (22, 5)


def output(argv: Sequence[str], timeout: float) -> tuple[str, str]:
    """What a step prints to stdout and stderr in a limited time: a node that does not respond holds
    up srun, not what the others have printed.

    Args:
        timeout: seconds.

    Raises:
        SlurmMissing: there is no srun.
    """
    check_sandbox(os.environ)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = subprocess.Popen(
                argv, env=_environ(), stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )
        except FileNotFoundError:
            raise _missing() from None
        with process:
            _wait(process, timeout)
        out.seek(0)
        err.seek(0)
        return out.read().decode(errors="replace"), err.read().decode(errors="replace")


def _wait(process: subprocess.Popen[bytes], timeout: float) -> None:
    """Wait for a process, and end it if it takes too long."""
    for seconds, end in ((timeout, process.terminate), (KILL_WAIT, process.kill)):
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            end()


def become(argv: Sequence[str]) -> NoReturn:
    """Replace this process by a step.

    Raises:
        SlurmMissing: there is no srun.
    """
    check_sandbox(os.environ)
    try:
        os.execvpe(argv[0], list(argv), _environ())
    except FileNotFoundError:
        raise _missing() from None


def _environ() -> dict[str, str]:
    return {**clean(os.environ), **other_clusters.variables()}


def _missing() -> SlurmMissing:
    hint = "run this on a login node, with Slurm's programs on PATH"
    return SlurmMissing("srun not found", hint=hint)
