"""The kinds of nodes of each partition, from one call of sinfo: a row for each kind, not each node.

A kind is what a job can ask for: the same CPUs, memory, generic resources and features. The names
and meanings of the fields are those of sinfo(1).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from hpcddp.errors import SlurmUnreachable
from hpcddp.slurm import commands as slurm

# Features may contain anything but spaces and commas, and host lists too: both come last.
FIELDS = "%P|%T|%D|%c|%X|%m|%G|%f|%N"
# States in which a node starts no job, and those in which it can be started for one.
OUT = ("down", "drain", "fail", "unknown", "inval", "error", "no_respond", "perfctrs", "blocked")
ASLEEP = ("powered_down", "powering_down", "powering_up", "power_down")
# sinfo adds a mark to a state: ~ powered down, # powering up, % powering down, ! to be powered
# down, * not responding, $ maintenance, @ to be rebooted, ^ rebooting, - planned.
MARKS = {"*": "not responding", "~": "powered_down", "#": "powering_up", "%": "powering_down"}
# A slice of a GPU, such as a100_1g.5gb or 1g.10gb+me: NVIDIA's name for a MIG profile.
SLICE = re.compile(r"(?:^|_)\d+g\.\d+gb(?:\+\w+)*$")
UNITS = {"": 1, "K": 1024, "M": 1024**2}


@dataclass(frozen=True)
class Gpus:
    """GPUs of one type on a node.

    Args:
        type: as Slurm names it, such as a100; "" where it has no name.
    """

    type: str
    count: int

    @property
    def sliced(self) -> bool:
        """Whether these are slices of GPUs (MIG)."""
        return bool(SLICE.search(self.type))


@dataclass
class NodeKind:
    """Nodes of a partition that are alike.

    Args:
        default: whether the partition is the default one.
        nodes: number of nodes.
        cpus: per node, those that Slurm counts: threads or cores.
        memory_mb: per node, in MB of 2**20 bytes.
        gpus: per node, one row for each type.
        features: that --constraint can name.
        hosts: host list, in Slurm's short form.
        states: state -> number of nodes, without the marks of sinfo.
    """

    partition: str
    default: bool
    nodes: int
    cpus: int
    sockets: int
    memory_mb: int
    gpus: tuple[Gpus, ...]
    features: tuple[str, ...]
    hosts: str
    states: dict[str, int] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[object, ...]:
        """What makes nodes alike, in whatever partition."""
        return self.cpus, self.sockets, self.memory_mb, self.gpus, self.features

    @property
    def gpu_count(self) -> int:
        """GPUs of a node, of all types together; a slice counts as one."""
        return sum(row.count for row in self.gpus)

    @property
    def usable(self) -> int:
        """Number of nodes that run jobs, or can be started for one."""
        return sum(n for state, n in self.states.items() if not state.startswith(OUT))

    @property
    def asleep(self) -> int:
        """Number of nodes that are powered down, and are started for a job."""
        return sum(n for state, n in self.states.items() if state in ASLEEP)


def read(timeout: float = slurm.TIMEOUT) -> list[NodeKind]:
    """The kinds of nodes, in sinfo's order.

    Raises:
        SlurmUnreachable: there is no answer.
    """
    done = slurm.call(
        "sinfo", "--all", "--noheader", "--exact", f"--format={FIELDS}", timeout=timeout
    )
    if done.returncode:
        raise SlurmUnreachable(f"sinfo: {slurm.first_line(done.stderr)}")
    return parse(done.stdout)


def parse(text: str) -> list[NodeKind]:
    """The kinds of nodes in sinfo's answer: it has a row for each state of a kind."""
    kinds: dict[tuple[object, ...], NodeKind] = {}
    for line in text.splitlines():
        if line.count("|") < FIELDS.count("|"):
            continue
        name, state, nodes, cpus, sockets, memory, gres, features, hosts = line.split("|", 8)
        row = NodeKind(
            name.rstrip("*"), name.endswith("*"), whole(nodes), whole(cpus), whole(sockets),
            whole(memory), tuple(gpus(gres)), _listed(features), hosts.strip(),
        )  # fmt: skip
        key = (row.partition, *row.shape)
        kind = kinds.setdefault(key, row)
        if kind is not row:
            kind.nodes += row.nodes
            kind.hosts = ",".join(filter(None, (kind.hosts, row.hosts)))
        kind.states = dict(Counter(kind.states) + Counter({_state(state): row.nodes}))
    return [kind for kind in kinds.values() if kind.nodes]


def _state(text: str) -> str:
    """A state of sinfo without its marks; a mark that changes what a node can do is the state."""
    word = text.strip().lower()
    marked = next((MARKS[mark] for mark in word if mark in MARKS), "")
    plain = re.sub(r"[^a-z_ +].*$", "", word).strip()
    if plain.startswith(OUT):
        return plain
    return "no_respond" if marked == "not responding" else marked or plain


def gpus(gres: str) -> Iterator[Gpus]:
    """The GPUs in generic resources, such as `gpu:a100:4(S:0-1),nvme:1`."""
    counted = Counter[str]()
    for part in re.split(r",(?![^(]*\))", gres):
        words = re.sub(r"\(.*", "", part.strip()).split(":")
        if words[0] != "gpu":
            continue
        number = re.fullmatch(r"(\d+)([KM]?)", words[-1])
        count = int(number[1]) * UNITS[number[2]] if number else 1
        named = words[1:-1] if number else words[1:]
        counted[":".join(word for word in named if word != "no_consume")] += count
    return (Gpus(name, count) for name, count in counted.items())


def whole(text: str) -> int:
    """A whole number of sinfo; it writes 64+ where nodes of a row differ, and N/A for none."""
    number = re.match(r"\d+", text.strip())
    return int(number[0]) if number else 0


def _listed(text: str) -> tuple[str, ...]:
    """A list with commas; (null) for none."""
    words = text.strip()
    return () if words in ("", "(null)", "N/A") else tuple(words.split(","))
