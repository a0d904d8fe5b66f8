"""What of a URL is a secret: who asks, a password, a signature (standard library only)."""

from __future__ import annotations

import re

# A password may hold a "/", as about half of AWS's secrets do: where no "@" ends it before the
# path, it reaches to the last one. None begins at a colon before another colon, which is a chain
# (zip://x::s3://y), or before a port.
_NONE = r":|\d{1,5}(?:[/?#\s'\",)\]]|$)"
_WHO = re.compile(rf"(?<=://)(?:[^/?#\s]*@|[^/?#\s@:\[]*:(?!{_NONE})\S*@)")
_PASSWORD = re.compile(rf"(://[^/:@\[]*:)(?:[^/]*@|(?!{_NONE}).*@)")
_SIGNATURE = re.compile(
    r"([?&](?:[\w-]*(?:signature|token|secret|password|credential|api[_-]?key)|sig)=)[^&#\s'\"]+",
    re.IGNORECASE,
)


def hidden(text: str, mark: str = "***") -> str:
    """A text without the users, passwords and signatures of the URLs in it."""
    return _SIGNATURE.sub(rf"\1{mark}", _WHO.sub(f"{mark}@", text))


def without_password(url: str) -> str:
    """One URL; a name alone, as abfs and hdfs have it before the @, stays."""
    return _PASSWORD.sub(r"\1***@", url)


def without_signature(url: str) -> str:
    """One URL, without what in its query lets anybody read."""
    return _SIGNATURE.sub(r"\1***", url) if "://" in url else url
