"""The answers of the dashboard: made on request, by one thread at a time, at a limited rate."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

EVERY = 1.0  # seconds at least between two looks
SHARE = 5  # a long look is followed by a pause of this many times its length,
LONGEST = 10.0  # but of at most this many seconds


class Answer(NamedTuple):
    """The bytes to send, and a tag that changes with them."""

    body: bytes
    tag: str


def answer(data: Any, same: Any = None) -> Answer:
    """Data as an answer.

    Args:
        same: the part of it that makes the tag; all of it without.
    """
    body = encoded(data)
    tagged = body if same is None else encoded(same)
    return Answer(body, f'"{hashlib.sha256(tagged).hexdigest()[:20]}"')


class CachedAnswer:
    """An answer that holds for a while; after that, the next thread that asks makes a new one."""

    def __init__(self, make: Callable[[], Answer]) -> None:
        self.asked = time.monotonic()
        self._make = make
        self._lock = threading.Lock()
        self._answer: Answer | None = None
        self._due = 0.0

    def get(self) -> Answer:
        """The newest answer; the previous one while another thread makes a new one."""
        self.asked = time.monotonic()
        before = self._answer
        if before and time.monotonic() < self._due:
            return before
        if not self._lock.acquire(blocking=before is None):
            return before or self.get()
        try:
            if self._answer is None or time.monotonic() >= self._due:
                began = time.monotonic()
                self._answer = self._make()
                now = time.monotonic()
                # The first look takes much longer than the next ones.
                pause = min(SHARE * (now - began), LONGEST) if before else 0.0
                self._due = now + max(EVERY, pause)
            return self._answer
        finally:
            self._lock.release()


def encoded(data: Any) -> bytes:
    """JSON: NaN becomes null, and invalid characters are replaced."""
    try:
        return msgspec.json.encode(data)
    except UnicodeEncodeError:  # lone surrogates
        return msgspec.json.encode(_text(data))


def _text(data: Any) -> Any:
    if isinstance(data, str):
        return data.encode("utf-8", "replace").decode()
    if isinstance(data, dict):
        return {_text(name): _text(value) for name, value in data.items()}
    return [_text(value) for value in data] if isinstance(data, list | tuple) else data
