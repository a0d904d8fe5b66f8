"""S3 and compatible stores, with s3torchconnector.

The client finds credentials where AWS's own tools do; this module never reads, stores or prints
them. AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL is the address of a server other than AWS's.
"""

from __future__ import annotations

import configparser
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from s3torchconnector import S3ClientConfig
from s3torchconnector._s3client import S3Client
from s3torchconnectorclient import S3Exception

from hpcddp.data.objects import StoreObject, version_of
from hpcddp.data.store_errors import Trouble

T = TypeVar("T")
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
# Pattern of the client's message -> kind of failure; any other message is "down", which may pass.
SAID = {
    r"bucket does not exist": "bucket",
    r"key does not exist": "missing",
    r"InvalidAccessKeyId|SignatureDoesNotMatch": "keys",
    r"(?i:access key id) .* not exist|signature .* does not match": "keys",  # other servers' text
    r"(?:Expired|Invalid)Token|(?i:token .*(?:expired|malformed|invalid))": "keys",
    r"Forbidden|AccessDenied": "denied",
    r"[Nn]o signing credentials": "credentials",
    r"[Ww]rong region|PermanentRedirect": "region",
    r"response_status: 4(?!08|29)\d\d": "other",
}
ATTEMPTS = 2  # of the client itself; places.py retries longer, and says so
_clients: dict[int, S3Client] = {}  # by process


class S3:
    """The objects below ``s3://bucket/prefix``."""

    def __init__(self, root: str) -> None:
        self._bucket, _, prefix = root.partition("://")[2].partition("/")
        self._prefix = prefix.rstrip("/") + "/" if prefix.strip("/") else ""

    def find(self) -> Iterator[StoreObject]:
        return self._below("")

    def named(self, names: Collection[str]) -> Iterator[StoreObject]:
        left = set(names)
        for item in self._below(os.path.commonprefix(list(left))):  # noqa: RUF071  of letters
            if item.name in left:
                yield item
                left.remove(item.name)
            if not left:  # keys are sorted: an existing object is the first with its prefix
                return

    def _below(self, start: str) -> Iterator[StoreObject]:
        """The objects whose names begin with ``start``."""
        pages = _asked(lambda: iter(client().list_objects(self._bucket, self._prefix + start)))
        while page := _asked(lambda: next(pages, None)):
            for item in page.object_info:
                if name := item.key[len(self._prefix) :]:
                    yield StoreObject(name, item.size, version_of(item.etag))

    def read(self, name: str, start: int, size: int) -> bytes:
        if size == 0:
            return b""
        span = () if size < 0 else (start, start + size)
        return _asked(lambda: b"".join(self._blocks(name, *span)))

    def stream(self, name: str) -> Iterator[bytes]:
        blocks = _asked(lambda: self._blocks(name))
        while data := _asked(lambda: next(blocks, None)):
            yield data

    def _blocks(self, name: str, *span: int) -> Iterator[bytes]:
        return iter(client()._get_object_stream(self._bucket, self._prefix + name, *span))


def client() -> S3Client:
    """The client of this process."""
    pid = os.getpid()
    if pid not in _clients:
        address = endpoint(os.environ)
        config = S3ClientConfig(force_path_style=bool(address), max_attempts=ATTEMPTS)
        _clients[pid] = S3Client(
            region(os.environ), endpoint=address or None, s3client_config=config
        )
    return _clients[pid]


def endpoint(environ: Mapping[str, str]) -> str:
    """The address of the server; empty for AWS."""
    return _first(environ, ENDPOINTS) or _configured(environ, "endpoint_url")


def region(environ: Mapping[str, str]) -> str:
    return _first(environ, REGIONS) or _configured(environ, "region") or "us-east-1"


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((environ[name] for name in names if environ.get(name)), "")


def _configured(environ: Mapping[str, str], name: str) -> str:
    """A value of the profile in ~/.aws/config. Only the client reads ~/.aws/credentials."""
    profile = environ.get("AWS_PROFILE") or "default"
    path = Path(environ.get("AWS_CONFIG_FILE") or Path.home() / ".aws" / "config")
    parser = configparser.RawConfigParser()
    try:
        parser.read(path, encoding="utf-8")
    except (OSError, configparser.Error, UnicodeDecodeError):
        return ""
    section = "default" if profile == "default" else f"profile {profile}"
    return parser.get(section, name, fallback="")


def _asked(call: Callable[[], T]) -> T:
    try:
        return call()
    except S3Exception as error:
        words = str(error)
        kind = next((kind for text, kind in SAID.items() if re.search(text, words)), "down")
        raise Trouble(kind, _short(words)) from None


def _short(words: str) -> str:
    """The client's message, shortened to the cause."""
    code = re.search(r"<Code>(\w+)</Code>", words)
    last = re.sub(r"^.*(AWS_\w+), (.*)$", r"\2", words.splitlines()[0].partition(", error_resp")[0])
    return code[1] if code else last.removeprefix("Client error: ").rstrip(".")[:200]
