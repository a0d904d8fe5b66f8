"""Secrets in URLs: users, passwords, signatures; and whether the user has a login for a host."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

# A password may contain "/", as about half of AWS's secrets do. If no "@" ends it before the path,
# it ends at the last "@". A colon before another colon is a chain (zip://x::s3://y), and a colon
# before digits a port: no password begins there.
_NONE = r":|\d{1,5}(?:[/?#\s'\",)\]]|$)"
_WHO = re.compile(rf"(?<=://)(?:[^/?#\s]*@|[^/?#\s@:\[]*:(?!{_NONE})\S*@)")
_PASSWORD = re.compile(rf"(://[^/:@\[]*:)(?:[^/]*@|(?!{_NONE}).*@)")
_SIGNATURE = re.compile(
    r"([?&](?:[\w-]*(?:signature|token|secret|password|credential|api[_-]?key)|sig)=)[^&#\s'\"]+",
    re.IGNORECASE,
)


def hidden(text: str, mark: str = "***") -> str:
    """A text without the users, passwords and signatures of its URLs."""
    return _SIGNATURE.sub(rf"\1{mark}", _WHO.sub(f"{mark}@", text))


def without_password(url: str) -> str:
    """A URL without its password; a user alone, as in abfs and hdfs URLs, stays."""
    return _PASSWORD.sub(r"\1***@", url)


def without_signature(url: str) -> str:
    """A URL without the signature in its query."""
    return _SIGNATURE.sub(r"\1***", url) if "://" in url else url


def in_netrc(host: str, environ: Mapping[str, str]) -> bool:
    """Whether the user's .netrc has a login for a host."""
    import netrc

    path = environ.get("NETRC") or Path(environ.get("HOME") or "~", ".netrc").expanduser()
    try:
        return netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
