"""`hpcddp cluster detect`, as one function: facts -> choices -> the text of a profile."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hpcddp.errors import ClusterError, SlurmUnreachable
from hpcddp.planning import clusters, key_schema
from hpcddp.planning.site import choices, detection, profile_writer, site_facts, verdicts
from hpcddp.planning.site.choices import Choice
from hpcddp.planning.site.profile_writer import SCHEMA, Written
from hpcddp.planning.site.site_facts import SiteFacts
from hpcddp.rundir import write_text
from hpcddp.slurm import sbatch

UNCHECKED = "interface, GPU driver, libc and $HOME are unknown until `hpcddp doctor` has run"
NAME = re.compile(r"[A-Za-z0-9][\w.+-]*")


@dataclass(frozen=True)
class Detected:
    """A cluster as Slurm describes it, and the profile for it.

    Args:
        path: of the profile, which is not written yet.
        present: the profile's text as it is; "" if there is none.
    """

    path: Path
    facts: SiteFacts
    present: str
    profile: Written

    @property
    def changed(self) -> bool:
        """Whether writing changes the profile."""
        return self.profile.text != self.present

    def warnings(self) -> Iterator[str]:
        """What may go wrong on the nodes."""
        here = platform.machine()
        nodes = self.facts.architectures()
        if here and nodes and here not in nodes:
            yield (
                f"the nodes are {' or '.join(sorted(nodes))}, but this machine is {here}: programs "
                "and Python environments of this machine do not run there"
            )

    def save(self) -> None:
        """Write the profile, if it changes, and the facts beside it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.changed:
            write_text(self.path, self.profile.text)
        write_text(self.path.with_name(SCHEMA), schema_text())
        site_facts.save(self.path, replace(self.facts, written=self.profile.values))


def schema_text() -> str:
    """The JSON Schema of cluster profiles."""
    made = key_schema.schema(clusters.KEYS, "cluster profile of hpcddp")
    return json.dumps(made, indent=1) + "\n"


def detect(
    name: str, environ: Mapping[str, str], *, force: bool = False, tries: bool = True,
    other: str = "",
) -> Detected:  # fmt: skip
    """Read the cluster of this shell, and make its profile.

    Args:
        name: of the profile; "" for the cluster's name at Slurm.
        force: replace what a person changed.
        tries: ask sbatch what it accepts.
        other: the name of another cluster than that of this shell, for --clusters.

    Raises:
        SlurmUnreachable: Slurm is missing, or its controller does not answer.
        ClusterError: the name or the present profile is invalid.
    """
    facts = detection.read(other)
    path = _path(name or clusters.profile_name(facts.cluster), environ)
    if path.exists():
        clusters.read(path)  # an invalid profile is a person's to fix
    present = path.read_text(encoding="utf-8") if path.exists() else ""
    last = _before(path) if present else None
    if last and last.cluster == facts.cluster:
        facts.nodes, facts.checked = last.nodes, last.checked
        facts.unseen, facts.imports = last.unseen, last.imports
    before = None if force else last
    values = choices.of(facts)
    if tries:
        values = _tried(facts, values)
    if before and (not tries or "trials" in facts.unread):
        facts.tried = before.tried
    unknown = choices.unread(facts)
    values = [row for row in values if row.key not in unknown]
    if not tries or "trials" in facts.unread:
        unknown |= choices.BY_TRIALS
    written = profile_writer.write(
        facts.cluster, values, notes=_notes(facts), present=present, unknown=unknown,
        earlier=before.written if before else None, force=force, where=str(path),
    )  # fmt: skip
    return Detected(path, facts, present, written)


def _notes(facts: SiteFacts) -> list[str]:
    """The lines about trials and gaps in the head of a profile."""
    tries, gaps, nodes = profile_writer.MARKS
    rows = [f"{tries}{text}" for text in facts.tried]
    gone = ((part, why) for part, why in facts.unread.items() if why != choices.NO_ACCOUNTING)
    rows += [f"{gaps}{part} ({' '.join(why.split())})" for part, why in gone]
    return [*rows, f"{nodes}{facts.nodes or UNCHECKED}"]


def _before(path: Path) -> SiteFacts | None:
    """The facts of the last detection; None if they are missing or damaged: then all that is in the
    profile stays."""
    try:
        return site_facts.load(path)
    except ClusterError:
        return None


def _tried(facts: SiteFacts, guesses: list[Choice]) -> list[Choice]:
    """The values after the trials, which are recorded in the facts."""
    try:
        tried = verdicts.run(facts, guesses, sbatch.verdict)
    except SlurmUnreachable as error:
        facts.unread["trials"] = error.what
        return guesses
    facts.tried = [str(trial) for trial in tried]
    return verdicts.applied(guesses, tried)


def _path(name: str, environ: Mapping[str, str]) -> Path:
    """The file of a profile in the user's folder."""
    if name in clusters.TAKEN:
        hint = "give it another one: `hpcddp cluster detect NAME`"
        raise ClusterError(f"{name} is a reserved name", where="NAME", hint=hint)
    if not NAME.fullmatch(name):
        hint = "give it another one: `hpcddp cluster detect NAME`"
        raise ClusterError(f"invalid name of a profile: {name!r}", where="NAME", hint=hint)
    return clusters.folders(environ)[0] / f"{name}.toml"
