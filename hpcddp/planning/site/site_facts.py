"""The facts of a cluster, as `hpcddp cluster detect` read them: a JSON file beside the profile.

A profile (TOML) holds choices, for people; this file holds facts, for commands. Both have the same
name. What changes seldom is read from it in place of Slurm.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hpcddp.errors import ClusterError
from hpcddp.rundir import write_text
from hpcddp.slurm.accounts import Association, Budget, Qos
from hpcddp.slurm.hostlist import first_host
from hpcddp.slurm.node_kinds import NodeKind
from hpcddp.slurm.node_samples import NodeSample
from hpcddp.slurm.partitions import Partition
from hpcddp.slurm.reservations import Reservation

SCHEMA_VERSION = 1
DAY = 86400.0  # seconds; facts that are older refuse nothing
SLOW_IMPORT = 30.0  # seconds of the import of torch that are worth a word


@dataclass
class SiteFacts:
    """The facts of a cluster.

    Args:
        cluster: its name at Slurm.
        version: of Slurm.
        read: when, in seconds since the epoch.
        config: the settings of slurm.conf(5) that matter here.
        samples: one node of each shape, by name.
        default_account: the user's; "" for none, or without accounting.
        budgets: of the user's accounts, and of the user in them.
        unread: what could not be read -> the reason.
        tried: small requests, and what `sbatch --test-only` said of each.
        nodes: what a check-up read of the nodes, which Slurm does not say; "" before the first.
        checked: when that was, in seconds since the epoch.
        unseen: folders that check-ups found missing on nodes.
        imports: a Python, as software_facts.place names it -> the longest import of torch in its
            last check-up, in seconds.
        clusters: its name for sbatch's option --clusters, if it is not that of the shell.
        written: the values that detect wrote into the profile, by dotted name.
    """

    cluster: str
    version: str
    read: float
    config: dict[str, str] = field(default_factory=dict)
    partitions: list[Partition] = field(default_factory=list)
    kinds: list[NodeKind] = field(default_factory=list)
    samples: dict[str, NodeSample] = field(default_factory=dict)
    default_account: str = ""
    associations: list[Association] = field(default_factory=list)
    qos: list[Qos] = field(default_factory=list)
    reservations: list[Reservation] = field(default_factory=list)
    budgets: list[Budget] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)
    tried: list[str] = field(default_factory=list)
    written: dict[str, Any] = field(default_factory=dict)
    nodes: str = ""
    checked: float = 0.0
    unseen: list[str] = field(default_factory=list)
    imports: dict[str, float] = field(default_factory=dict)
    clusters: str = ""
    schema_version: int = SCHEMA_VERSION

    @property
    def age(self) -> float:
        """Seconds since Slurm was asked."""
        return max(0.0, time.time() - self.read)

    @property
    def old(self) -> bool:
        """Whether Slurm was asked more than a day ago."""
        return self.age > DAY

    def partition(self, name: str = "") -> Partition | None:
        """The partition of a name; the default one without a name."""
        rows = (row for row in self.partitions if row.name == name or (not name and row.default))
        return next(rows, None)

    def kinds_of(self, partition: str) -> list[NodeKind]:
        """The kinds of nodes of a partition."""
        return [kind for kind in self.kinds if kind.partition == partition]

    def architectures(self) -> set[str]:
        """The CPU architectures of the nodes that were asked, such as x86_64."""
        return {row.arch for row in self.samples.values() if row.arch}

    def sample(self, kind: NodeKind) -> NodeSample | None:
        """The node that was asked of those of this shape."""
        alike = (row for row in self.kinds if row.shape == kind.shape and row.hosts)
        rows = (self.samples.get(first_host(row.hosts)) for row in alike)
        return next((row for row in rows if row), None)


class CheckUp(NamedTuple):
    """What a check-up found on the nodes.

    Args:
        moment: of the check-up, in seconds since the epoch.
        seen: folders -> whether the nodes see them.
        text: of the nodes, for people; "" if its job did not begin.
        imports: as in SiteFacts.
    """

    moment: float
    seen: Mapping[Path, bool]
    text: str = ""
    imports: Mapping[str, float] = {}


def path_of(profile: Path) -> Path:
    """Where the facts of a profile lie."""
    return profile.with_suffix(".json")


def load(profile: Path) -> SiteFacts | None:
    """The facts beside a profile; None if there are none.

    Raises:
        ClusterError: the file is damaged.
    """
    import msgspec

    path = path_of(profile)
    try:
        return msgspec.json.decode(path.read_bytes(), type=SiteFacts)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        hint = "read it again with `hpcddp cluster detect`"
        raise ClusterError(f"damaged facts: {error}", where=str(path), hint=hint) from None


def save(profile: Path, facts: SiteFacts) -> None:
    """Write the facts beside a profile."""
    import msgspec

    text = msgspec.json.format(msgspec.json.encode(facts), indent=1).decode()
    write_text(path_of(profile), text + "\n")


def add_check_up(profile: Path, check: CheckUp) -> str:
    """Add what a check-up found on the nodes to the facts beside a profile.

    Returns:
        Why it is not kept; "" if it is, or if the facts have a newer check-up.
    """
    try:
        facts = load(profile)
        if not facts:
            return f"{path_of(profile)} does not exist"
        if check.moment > facts.checked:
            facts.checked, facts.unseen = check.moment, _unseen(facts.unseen, check.seen)
            if check.text:
                facts.nodes = f"{check.text} (doctor, {stamp(check.moment)})"
            facts.imports |= check.imports
            save(profile, facts)
    except ClusterError:
        return f"{path_of(profile)} is damaged"
    except OSError as error:
        return f"cannot write {path_of(profile)}: {error.strerror}"
    return ""


def _unseen(before: Iterable[str], seen: Mapping[Path, bool]) -> list[str]:
    """The folders that nodes do not see, after a check-up: one that they see is no longer among
    them, nor are those above it."""
    real = {Path(os.path.realpath(path)): sees for path, sees in seen.items()}
    there = {above for path, sees in real.items() if sees for above in (path, *path.parents)}
    gone = {*map(Path, before), *(path for path, sees in real.items() if not sees)}
    return sorted(map(str, gone - there))


def stamp(moment: float) -> str:
    """A time in words, in UTC."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(moment))
