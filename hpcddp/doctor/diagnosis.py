"""From the results of a check-up's job to findings, each with what to do."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

from hpcddp.attempt.nodes import machine
from hpcddp.doctor.check_finding import ERROR, WARNING, CheckFinding, merged
from hpcddp.doctor.node_summary import Measurements, drivers
from hpcddp.planning.site.site_facts import SLOW_IMPORT
from hpcddp.sizes import counted, size

GB = 10**9
FILES = 4096  # open files of a process
WRITE = 0.25  # seconds
FREE = 10 * GB
FEW = 0.01  # of the files that a disk can hold
CLOCK = 1.0  # seconds
VISIBLE = 5.0  # seconds
SLOW_PAIR = 0.5  # of the median bandwidth
SLOW_NET = 1.25e9  # bytes per second, 10 Gbit/s


def of(results: Measurements) -> list[CheckFinding]:
    """What the nodes of a check-up have, errors first."""
    rows: list[Measurements] = results["ranks"]
    heads = [row for row in rows if "host" in row]  # one rank of each node
    hosts = {row["node"]: str(row["host"]) for row in heads}
    findings = (
        finding
        for part in (_alike(heads), _here(heads, results.get("here", {})), _nodes(heads),
                     _gpus(heads, results), _memory_errors(heads), _ranks(rows, hosts),
                     _slow(results, rows, hosts), _links(results, hosts))
        for finding in part
    )  # fmt: skip
    return merged(findings)


def unfit(results: Measurements) -> dict[str, str]:
    """The nodes that jobs should avoid, and why: with faults, or slow as a whole or in parts."""
    rows: list[Measurements] = results["ranks"]
    hosts = {row["node"]: str(row["host"]) for row in rows if "host" in row}
    heads = [row for row in rows if "host" in row]
    bad = [*_memory_errors(heads), *_slow(results, rows, hosts)]
    return {finding.where: finding.what for finding in bad}


def _alike(heads: Sequence[Measurements]) -> Iterator[CheckFinding]:
    """Nodes that differ in what must be the same, or should be."""
    one = "use one environment that all nodes see"
    kind = "choose nodes of one kind with --constraint, or tell your administrators"
    names = {"python": "Python", "torch": "torch", "architecture": "CPU architecture"}
    for key, name in names.items():
        yield from _differing(name, {str(row["host"]): str(row[key]) for row in heads}, ERROR, one)
    libc = {str(row["host"]): str(row["libc"]) for row in heads}
    driver = {str(row["host"]): ", ".join(drivers([row])) for row in heads}
    yield from _differing("libc", libc, WARNING, kind)
    yield from _differing("the GPU driver", driver, WARNING, kind)


def _differing(
    name: str, versions: Mapping[str, str], level: str, hint: str
) -> Iterator[CheckFinding]:
    """A finding if nodes have different versions.

    Args:
        versions: host -> its version; blank if unknown.
    """
    hosts_of: dict[str, list[str]] = {}
    for host, version in versions.items():
        if version.strip():
            hosts_of.setdefault(version, []).append(host)
    if len(hosts_of) > 1:
        text = ", ".join(f"{version} on {_few(hosts)}" for version, hosts in hosts_of.items())
        yield CheckFinding(level, "all nodes", f"{name} differs: {text}", hint)


def _here(heads: Sequence[Measurements], here: Measurements) -> Iterator[CheckFinding]:
    """What differs between this machine and nodes that are alike."""
    for key, name in (("python", "Python"), ("torch", "torch")):
        there = {str(row[key]).partition("+")[0] for row in heads}
        own = str(here.get(key, "")).partition("+")[0]
        if own and len(there) == 1 and own not in there:
            what = f"{name} differs: {own} here, {there.pop()} on the nodes"
            hint = "use one environment that this machine and the nodes see"
            yield CheckFinding(WARNING, "here", what, hint)
    if abs(here.get("clock", 0.0)) > CLOCK:
        what = f"the clock differs by {here['clock']:+.1f} s from that of the first node"
        hint = "tell your administrators: times of jobs and of files are wrong by as much"
        yield CheckFinding(WARNING, "here", what, hint)


def _few(hosts: Sequence[str]) -> str:
    more = len(hosts) - 3
    return ", ".join(hosts[:3]) + (f" and {more} more" if more > 0 else "")


def space(where: str, name: str, disk: Measurements) -> Iterator[CheckFinding]:
    """A disk that is nearly full."""
    if not disk:
        yield CheckFinding(
            ERROR, where, f"{name} cannot be read", "check the path and its permissions"
        )
        return
    if disk["free"] < FREE:
        what = f"{size(disk['free'])} of {size(disk['size'])} are free in {name}"
        yield CheckFinding(
            WARNING, where, what, "remove files, or use another folder: a full disk ends jobs"
        )
    if disk["files"] and disk["free_files"] < FEW * disk["files"]:
        what = f"{name} has room for {counted(disk['free_files'], 'more file')}"
        yield CheckFinding(
            WARNING, where, what, "remove files: each checkpoint needs several files"
        )


def open_files(where: str, count: int | None) -> Iterator[CheckFinding]:
    """A limit on open files that a DataLoader with workers meets."""
    if count is not None and count < FILES:
        what = f"a process may open {count} files"
        yield CheckFinding(WARNING, where, what, f"raise it with `ulimit -n {FILES}` or more")


def _nodes(heads: Sequence[Measurements]) -> Iterator[CheckFinding]:
    """What each node tells of itself."""
    many = len({row["host"] for row in heads}) > 1
    for row in heads:
        host = str(row["host"])
        yield from space(host, "the runs folder", row["folder"])
        yield from space(host, "/tmp", row["tmp"])
        yield from open_files(host, row["open_files"])
        if row["writes"].get("median", 0.0) > WRITE:
            what = f"a small file takes {row['writes']['median']:.2g} s to write in the runs folder"
            yield CheckFinding(WARNING, host, what, "use a faster file system with --runs")
        if not row["home"]:
            hint = "keep code, environment and runs in a folder that the nodes see"
            yield CheckFinding(WARNING, host, "the home folder does not exist", hint)
        if many and str(row["address"]).startswith("127."):
            what = f"its address is {row['address']}, which other nodes cannot reach"
            hint = "set `interface` or `host_suffix` in the cluster profile"
            yield CheckFinding(ERROR, host, what, hint)
        for target, why in row["unreachable"].items():
            hint = "use a tracker or store that the nodes reach, or a proxy (HTTPS_PROXY)"
            yield CheckFinding(ERROR, host, f"{target} cannot be reached: {why}", hint)


def _gpus(heads: Sequence[Measurements], results: Measurements) -> Iterator[CheckFinding]:
    """GPUs with faults, and GPUs that torch does not use."""
    for row in heads:
        host = str(row["host"])
        if row["gpus"] and results["backend"] == "gloo" and results.get("device") != "cpu":
            hint = "install a build of torch with CUDA, or check the driver's version"
            yield CheckFinding(ERROR, host, "torch does not use the GPUs of the node", hint)
        for number, gpu in enumerate(row["gpus"]):
            for why in machine.throttled(gpu):
                what = f"GPU {number} is slowed down: {why} ({gpu['temperature']} degrees)"
                yield CheckFinding(
                    WARNING,
                    host,
                    what,
                    "tell your administrators; its cooling or power is at fault",
                )


def _memory_errors(heads: Sequence[Measurements]) -> Iterator[CheckFinding]:
    """GPUs whose memory has failed."""
    for row in heads:
        for number, gpu in enumerate(row["gpus"]):
            if errors := machine.memory_errors(gpu):
                what = f"GPU {number} has {counted(errors, 'uncorrected memory error')}"
                yield CheckFinding(ERROR, str(row["host"]), what, "tell your administrators")


def _ranks(rows: Sequence[Measurements], hosts: Mapping[int, str]) -> Iterator[CheckFinding]:
    """What each rank measured of its environment."""
    for row in rows:
        host = hosts.get(row["node"], "?")
        if row["import_seconds"] > SLOW_IMPORT:
            what = f"importing torch takes {row['import_seconds']:.0f} s"
            hint = "install the environment in one file (a container), or on the nodes' disks"
            yield CheckFinding(WARNING, host, what, hint)
        if row["visible"] is None:
            what = "a file that another node wrote in the runs folder is not visible"
            yield CheckFinding(ERROR, host, what, "use a shared folder with --runs")
        elif row["visible"] > VISIBLE:
            what = f"a file of another node is visible after {row['visible']:.0f} s"
            yield CheckFinding(WARNING, host, what, "use another file system for runs")
        if abs(row["clock"]) > CLOCK:
            what = f"the clock differs by {row['clock']:+.1f} s from that of the first node"
            yield CheckFinding(
                WARNING, host, what, "tell your administrators: the nodes' clocks must agree"
            )


def _slow(
    results: Measurements, rows: Sequence[Measurements], hosts: Mapping[int, str]
) -> Iterator[CheckFinding]:
    """Ranks that compute slowly: a whole node, or some of its devices."""
    parts = {int(number): part for number, part in results["slow"].items()}
    hint = "tell your administrators"
    for node, host in hosts.items():
        own = [row for row in rows if row["node"] == node]
        slow = [row for row in own if row["rank"] in parts]
        if slow and len(slow) == len(own):
            usual = statistics.median(parts[row["rank"]] for row in slow)
            what = f"computes at {usual:.0%} of the speed of the others"
            yield CheckFinding(WARNING, host, what, hint)
        elif slow:
            for row in slow:
                what = f"{row['device']} computes at {parts[row['rank']]:.0%} of the usual speed"
                yield CheckFinding(WARNING, host, what, hint)


def _links(results: Measurements, hosts: Mapping[int, str]) -> Iterator[CheckFinding]:
    """Pairs of nodes with a slow network between them."""
    speeds = [speed for _, _, speed in results["pairs"]]
    if not speeds:
        return
    usual = statistics.median(speeds)
    for first, second, speed in results["pairs"]:
        if len(speeds) > 2 and speed < SLOW_PAIR * usual:
            what = f"{size(speed)}/s between these nodes; {size(usual)}/s between others"
            where = f"{hosts[first]} and {hosts[second]}"
            yield CheckFinding(
                WARNING, where, what, "tell your administrators: a cable or port may be at fault"
            )
    if results["backend"] == "nccl" and usual < SLOW_NET:
        what = f"{size(usual)}/s between nodes"
        hint = "set `interface` in the cluster profile to the fast network; see NCCL_DEBUG=INFO"
        yield CheckFinding(WARNING, "all nodes", what, hint)


def table_of_sizes(results: Measurements) -> Iterable[tuple[str, str, str]]:
    """All-reduce by size: size, time, bus bandwidth."""
    for row in results["all_reduce"]:
        seconds = row["seconds"]
        shown = f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"
        yield size(row["bytes"]), shown, f"{size(row['bus'])}/s"
