"""The launcher `horovod`: the environment of its ranks, and what it needs.

Ranks get their places as from `horovodrun --gloo`, and their rendezvous is horovod_rendezvous.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcddp.planning.clusters import Profile
    from hpcddp.spec import JobSpec
    from hpcddp.topology import Rank

START = 600  # seconds until all ranks must be there; Horovod's 30 are too short for an import
HELP = (
    'build it as the page "Move from Horovod to DDP" of the documentation shows, or use DDP in the '
    "script and another launcher"
)

# Runs in the Python of the command. It does not import Horovod, which takes seconds.
LOOK = """
import importlib.util, json, pathlib, sys
from importlib.metadata import PackageNotFoundError, version
spec = importlib.util.find_spec("horovod")
report = {"python": sys.executable, "there": bool(spec and spec.origin)}
try:
    report["torch"] = version("torch")
    report["built"] = json.loads(pathlib.Path(spec.origin).with_name("metadata.json").read_text())
except (AttributeError, OSError, PackageNotFoundError, TypeError, ValueError):
    pass
print(json.dumps(report))
"""


def environment(rank: Rank, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that give a rank its place in Horovod. The host name must differ between nodes,
    also if several virtual nodes are one machine."""
    variables = {
        "RANK": rank.world_rank,
        "SIZE": rank.world_size,
        "LOCAL_RANK": rank.local_rank,
        "LOCAL_SIZE": rank.local_size,
        "CROSS_RANK": rank.node,
        "CROSS_SIZE": rank.world_size // rank.local_size,
        "HOSTNAME": f"{os.uname().nodename}-{rank.node}",
        "CONTROLLER": "gloo",
        "CPU_OPERATIONS": "gloo",
        "GLOO_TIMEOUT_SECONDS": environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS", START),
    }
    interface = environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if interface := environ.get("HOROVOD_GLOO_IFACE", interface):
        variables["GLOO_IFACE"] = interface
    return {f"HOROVOD_{name}": str(value) for name, value in variables.items()}


def missing(job: JobSpec, profile: Profile) -> str:
    """What the command's Python lacks, in the form of launchers.nothing; "" if only the nodes can
    tell."""
    from hpcddp import versions

    if not job.command:
        return "it requires a script that uses Horovod, given after --; a job's task uses DDP"
    program = job.command[0]
    if job.own_programs or not Path(program).name.startswith("python"):
        return ""
    given = {name: str(value) for name, value in job.env.items()}
    report = versions.ask(program, LOOK, {**os.environ, **given})
    if report and not report["there"]:
        return f"horovod is not installed in {report['python']}\n{HELP}"
    built, torch = report.get("built"), report.get("torch", "")
    if built and _release(built.get("pytorch", "")) != _release(torch):
        was = built.get("pytorch", "none")
        return f"horovod in {report['python']} was built for torch {was}, not {torch}\n{HELP}"
    return ""


def _release(version: str) -> list[str]:
    """The part of a version that fixes the binary interface: 2.13 of 2.13.1+cpu."""
    return version.split(".")[:2]
