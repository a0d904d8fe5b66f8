"""`hpcddp cluster detect` on a recorded cluster of 10,000 nodes, beside Slurm's answers alone.

Whole processes. The answers lie in files, and small programs print them: 40 partitions of ten kinds
of nodes in six states, with host lists in pieces, and 200 reservations. The floor is a
shell that runs the same programs. The limit is in seconds, with those answers in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure import Row
from benchmarks.site import HPCDDP, Site, wall

LIMIT = 2.0  # seconds
NODES, PARTITIONS, KINDS = 10_000, 40, 10
STATES = ("idle", "mixed", "allocated", "down*", "drained", "idle~")
CONFIG = """\
AccountingStorageType   = accounting_storage/slurmdbd
ClusterName             = large
PriorityType            = priority/multifactor
SelectType              = select/cons_tres
SLURM_VERSION           = 24.11.5
TopologyPlugin          = topology/tree
"""
CALLS = ("show config", "show partition", "show node", "show reservation")


def rows(site: Site) -> Iterator[Row]:
    folder = site.fresh()
    _programs(folder)
    environ = {**site.environ, "PATH": f"{folder}:{site.environ['PATH']}"}
    environ["XDG_CONFIG_HOME"] = str(folder / "config")
    ask = "; ".join(
        [*(f"scontrol {call}" for call in CALLS), "sinfo", "sacctmgr", "sacctmgr", "sshare"]
    )
    ours, floor = site.interleave(
        "detect",
        lambda: wall([HPCDDP, "cluster", "detect", "--force"], environ, folder),
        lambda: wall(["bash", "-c", f"{ask} >/dev/null"], environ, folder),
    )
    yield Row("detect", ours, floor, limit=LIMIT)


def _programs(folder: Path) -> None:
    """Slurm's programs, which print files."""
    answers = {
        "config": CONFIG,
        "partition": "".join(map(_partition, range(PARTITIONS))),
        "sinfo": "".join(_kinds()),
        "node": "".join(map(_node, range(KINDS))),
        "reservation": "".join(map(_reservation, range(200))),
    }
    for name, text in answers.items():
        (folder / f"{name}.txt").write_text(text)
    shows = "\n".join(f"*'show {name}'*) cat {folder}/{name}.txt;;" for name in answers)
    _program(folder / "scontrol", f'case "$*" in\n{shows}\nesac')
    _program(folder / "sinfo", f"cat {folder}/sinfo.txt")
    _program(folder / "sacctmgr", 'case "$*" in *user*) echo "a|a||normal|normal||||||";; esac')
    _program(folder / "sshare", "echo 'a||gres/gpu=100000|gres/gpu=1000'")
    _program(folder / "sbatch", "cat >/dev/null; echo 'sbatch: Job 9 to start' >&2")


def _program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def _partition(number: int) -> str:
    default = "YES" if number == 0 else "NO"
    return (
        f"PartitionName=p{number} AllowAccounts=ALL AllowQos=ALL AllowGroups=ALL Default={default} "
        "DefaultTime=01:00:00 MaxTime=2-00:00:00 MaxNodes=512 MinNodes=1 PreemptMode=OFF "
        f"State=UP TotalNodes={NODES} DefMemPerCPU=2000 TRES=cpu=1,gres/gpu=4\n"
    )


def _kinds() -> Iterator[str]:
    """sinfo's rows: each node is in four partitions; its hosts are in pieces of five."""
    each = NODES // KINDS
    for partition in range(PARTITIONS):
        for kind in range(partition % 4, KINDS, 3):
            for number, state in enumerate(STATES):
                first = kind * each + number * each // len(STATES)
                spans = range(first, first + each // len(STATES), 7)
                hosts = ",".join(f"{start:05}-{start + 4:05}" for start in spans)
                star = "*" if partition == 0 else ""
                yield (
                    f"p{partition}{star}|{state}|{5 * len(spans)}|{64 + kind}|2|{500_000 + kind}|"
                    f"gpu:a{kind}:4(S:0-1)|a{kind},ib|n[{hosts}]\n"
                )


def _node(kind: int) -> str:
    first = kind * NODES // KINDS
    return (
        f"NodeName=n{first:05} Arch=x86_64 CPUTot={64 + kind} CPUEfctv={60 + kind} Sockets=2 "
        f"CoresPerSocket=32 ThreadsPerCore=1 RealMemory={500_000 + kind} State=IDLE\n"
    )


def _reservation(number: int) -> str:
    start = 1_795_000_000 + 3600 * number
    return (
        f"ReservationName=r{number} StartTime={start} EndTime={start + 3600} Nodes=n[00001-00100] "
        "NodeCnt=100 PartitionName=(null) Flags=SPEC_NODES Users=u Accounts=(null)\n"
    )
