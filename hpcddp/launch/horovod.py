"""The launcher `horovod`: what its ranks find in their environment, and what must be there before.

A rank gets its place as by `horovodrun --gloo`. They find each other in
horovod_rendezvous.py.
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

START = 600  # seconds in which all ranks must be there; Horovod's own 30 are short for an import
HELP = "build it there as docs/horovod.md shows, or let the script use DDP under any other launcher"

# Runs in the Python of the command, and imports nothing of Horovod: that takes seconds.
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
    """Who a rank is, in Horovod's words. A node's name stands for the ranks that share it, and is
    another on each node, also where several nodes are one machine."""
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
    """What the command's Python lacks, as launchers.nothing tells it; where only the nodes can
    tell, nothing."""
    from hpcddp import versions

    if not job.command:
        return "it starts a script that uses Horovod, given after --, and a job's task uses DDP"
    program = job.command[0]
    if profile.cluster.modules or "PATH" in job.env or not Path(program).name.startswith("python"):
        return ""
    given = {name: str(value) for name, value in job.env.items()}
    report = versions.ask(program, LOOK, {**os.environ, **given})
    if report and not report["there"]:
        return f"there is no package horovod in {report['python']}\n{HELP}"
    built, torch = report.get("built"), report.get("torch", "")
    if built and _release(built.get("pytorch", "")) != _release(torch):
        was = built.get("pytorch", "none")
        return f"horovod in {report['python']} was built for torch {was}, and not {torch}\n{HELP}"
    return ""


def _release(version: str) -> list[str]:
    """What has one binary interface: 2.13 of 2.13.1+cpu."""
    return version.split(".")[:2]
