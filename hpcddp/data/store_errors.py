"""Failures of a store, or of one object in it."""

from __future__ import annotations

from typing import NamedTuple


class Kind(NamedTuple):
    """A kind of failure: message and hint.

    ``passes``: a retry may succeed. ``alone``: it concerns one object; others may be readable.
    """

    what: str
    hint: str
    passes: bool = False
    alone: bool = False


KINDS = {
    "bucket": Kind("no such bucket", "check the bucket's name and the store's address"),
    "missing": Kind("not found", "check the name; it may have been removed or renamed", alone=True),
    "denied": Kind(
        "access denied",
        "use credentials that allow listing and reading",
        alone=True,
    ),
    "forbidden": Kind("cannot read", "check its owner and mode", alone=True),
    "keys": Kind(
        "invalid credentials", "check that they are correct, not expired, and for this store"
    ),
    "credentials": Kind(
        "no credentials found",
        "write ~/.aws/credentials, or set AWS_PROFILE or AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY in the job's environment",
    ),
    "region": Kind("the bucket is in another region", "set AWS_REGION to that region"),
    "other": Kind("cannot read", "check the path or URL", alone=True),
    "down": Kind("does not answer", "check the store and its address", passes=True),
}


class Trouble(Exception):
    """A store reported a failure.

    Args:
        kind: a key of KINDS.
        reason: the store's own message.
    """

    def __init__(self, kind: str, reason: object = "") -> None:
        super().__init__(kind, reason)
        self.kind, self.reason = KINDS[kind], str(reason)
        self.missing = kind == "missing"
