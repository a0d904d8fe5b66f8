"""The troubles with a store, and with an object in it."""

from __future__ import annotations

from typing import NamedTuple


class Kind(NamedTuple):
    """A trouble in words for a person; ``passes``: waiting may help; ``alone``: other objects may
    be read."""

    what: str
    hint: str
    passes: bool = False
    alone: bool = False


KINDS = {
    "bucket": Kind("there is no such bucket", "look at its name, and at the store's address"),
    "missing": Kind(
        "is not there", "was it taken away, or renamed? The name must be exact", alone=True
    ),
    "denied": Kind(
        "may not be read with these credentials",
        "look at them, and at what they allow: listing and reading are needed",
        alone=True,
    ),
    "forbidden": Kind("may not be read", "look at who owns it, and at its mode", alone=True),
    "keys": Kind(
        "may not be read with these credentials", "are they right, and of this store's account?"
    ),
    "credentials": Kind(
        "there are no credentials for it",
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment of the job, or "
        "AWS_PROFILE, or write ~/.aws/credentials",
    ),
    "region": Kind("lies in another region", "set AWS_REGION to it"),
    "other": Kind("cannot be read", "look at the address", alone=True),
    "down": Kind("does not answer", "is the store up, and its address right?", passes=True),
}


class Trouble(Exception):
    """The error of a store in place of an answer.

    Args:
        kind: a key of KINDS.
        reason: its own words.
    """

    def __init__(self, kind: str, reason: object = "") -> None:
        super().__init__(kind, reason)
        self.kind, self.reason = KINDS[kind], str(reason)
        self.missing = kind == "missing"
