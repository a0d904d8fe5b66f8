import itertools
import os
import re
from functools import partial
from pathlib import Path

import pytest

from hpcddp.slurm import pending_reasons

# Slurm's own library: of this machine, and of the folders in which other releases lie.
OTHERS = Path(os.environ.get("SLURMS_ROOT", Path("~/.cache/hpcddp/slurms").expanduser()))
LIBRARY = "usr/lib/*/slurm*/libslurmfull.so"
LIBRARIES = sorted([*Path("/").glob(LIBRARY), *OTHERS.glob(f"*/{LIBRARY}")])
# The reasons stand together in it, from this one on, but for names that it has elsewhere too.
FIRST, NAME = b"PartitionNodeLimit", rb"[A-Z]+[a-z]\w*"
ALSO = (
    "AssocMaxWallDurationPerJobLimit", "Constraints", "Dependency", "InactiveLimit", "Licenses",
    "Priority", "Prolog", "Reservation", "Resources", "TimeLimit",
)  # fmt: skip


def reasons(library: Path) -> list[str]:
    """The names of all reasons in a library."""
    words = re.findall(rb"[ -~]{4,}(?=\0)", library.read_bytes())
    rows = itertools.takewhile(partial(re.fullmatch, NAME), words[words.index(FIRST) :])
    return [*ALSO, *(word.decode() for word in rows)]


@pytest.mark.skipif(not LIBRARIES, reason="no Slurm on this machine")
@pytest.mark.parametrize("library", LIBRARIES, ids=str)
def test_each_reason_of_a_release_is_a_sentence(library: Path) -> None:
    names = reasons(library)
    # 20.11 has 196 names, and later releases have more, this one last.
    assert len(set(names)) > 190
    assert ("MpiPortsBusy" in names) == (b"MpiPortsBusy" in library.read_bytes())
    assert [name for name in names if pending_reasons.sentence(name, "7") == name] == []


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Resources", "the nodes that it needs are busy: wait, or ask for less"),
        ("AssocGrpCPUMinutesLimit", "the account has used up its budget of CPUs: use another"),
        ("AssocGrpGRES", "more GPUs or other resources than the account allows all jobs together"),
        ("QOSMaxGRESPerUser", "than the QOS allows one user"),
        ("QOSMaxWallDurationPerJobLimit", "more time than the QOS allows one job: use a shorter"),
        ("QOSMinGRES", "the QOS requires more GPUs or other resources"),
        ("AssocMaxJobsLimit", "the account has reached its number of running jobs"),
        ("MaxSubmitJobsPerAccount", "the account has reached its number of submitted jobs"),
        ("AssocGrpCPURunMinutesLimit",
         "running jobs have reserved the whole budget of CPUs and time of the account: wait"),
        ("MaxNodeRunMinsPerUser", "reserved the whole budget of nodes and time of one user"),
        ("ReqNodeNotAvail, Reserved for maintenance", "needed for maintenance before it would end"),
        ("ReqNodeNotAvail,_UnavailableNodes:n[1-2]", "requested nodes are down"),
        ("JobHeldUser", "held by you; release it with scontrol release 7"),
        ("launch_failed_requeued_held", "failed to start on a node; release it with scontrol"),
        ("Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority",
         "nodes that it needs are down, drained or reserved: wait, or use fewer nodes"),
        ("Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved", "nodes that it needs are down"),
        ("Job's account not permitted to use this partition (gpu allows a not b)",
         "it may not use this partition: use another account (-A)"),
        ("QOSMaxNodePerJobLimit", "more nodes than the QOS allows one job: ask for less"),
    ],
)  # fmt: skip
def test_a_reason_says_what_to_change(reason: str, words: str) -> None:
    text = pending_reasons.sentence(reason, "7")
    assert text.startswith(f"{reason}: ") and words in text


def test_a_reason_that_is_not_known_is_slurms_own() -> None:
    assert pending_reasons.sentence("SomethingNew", "7") == "SomethingNew"
    assert pending_reasons.sentence("", "7") == ""
