"""Which association and QOS of the user a job runs under, as far as Slurm said."""

from __future__ import annotations

from hpcddp.planning.site.site_facts import SiteFacts
from hpcddp.planning.site.wanted import Wanted
from hpcddp.slurm.accounts import Association, Qos

STORAGE = "slurmdbd"  # the plugin of a Slurm with accounting
USUAL = "normal"  # the QOS of a job where neither it nor its association names one


def enforced(facts: SiteFacts, word: str) -> bool | None:
    """Whether Slurm enforces associations, limits or qos; None if unknown (slurm.conf(5))."""
    text = facts.config.get("AccountingStorageEnforce")
    if text is None:
        return None
    words = text.lower().split(",")
    implied = {"associations": ("associations", "limits", "safe", "qos", "wckeys"),
               "limits": ("limits", "safe")}  # fmt: skip
    return any(name in words for name in (*implied.get(word, (word,)), "all"))


def account(wanted: Wanted, facts: SiteFacts) -> str:
    """The account of a job: its own, or the user's default. Slurm keeps the names of accounts and
    QOS in lower case (sacctmgr(1))."""
    return wanted.option("account").lower() or facts.default_account


def associations(wanted: Wanted, facts: SiteFacts) -> list[Association]:
    """The associations of the job's account: for its partition, where there are such, or for all
    partitions."""
    rows = [row for row in facts.associations if row.account == account(wanted, facts)]
    partition = facts.partition(wanted.option("partition"))
    names = wanted.partitions or ([partition.name] if partition else [])
    own = [row for row in rows if row.partition in names]
    return own or [row for row in rows if not row.partition]


def name_of(wanted: Wanted, facts: SiteFacts) -> str | None:
    """The name of a job's QOS; "" where there is none, None if unknown."""
    if own := wanted.option("qos").lower():
        return own
    if not facts.config.get("AccountingStorageType", STORAGE).endswith(STORAGE):
        return ""  # there is no accounting
    rows = associations(wanted, facts)
    default = next((row.default_qos for row in rows if row.default_qos), "")
    may = {name for row in rows for name in row.qos}
    return default or (USUAL if USUAL in may else None)


def row_of(name: str | None, facts: SiteFacts) -> Qos | None:
    """A QOS by its name; None if unknown. Without a name it has no limits."""
    if name == "":
        return Qos("")
    return next((row for row in facts.qos if row.name == name), None)


def flags(wanted: Wanted, facts: SiteFacts | None) -> frozenset[str] | None:
    """The flags of a job's QOS; None if unknown, as where Slurm chooses a QOS and it is unknown
    which."""
    row = row_of(name_of(wanted, facts), facts) if facts else None
    return frozenset(row.flags) if row else None
