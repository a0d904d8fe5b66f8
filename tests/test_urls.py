"""Secrets in URLs are not shown, and what is none stays."""

import pytest

from hpcddp import trackers, urls

SHOWN = {
    "s3://KEY:hu/sh+g@bucket/pets": "s3://***@bucket/pets",
    "get s3://KEY:/hush@b and me@z": "get s3://***@b and me@z",
    "https://me:hu@sh@host:8/a@b": "https://***@host:8/a@b",
    "http://me:hu?sh#x@host": "http://***@host",
    "zip://x::sftp://me:hu/sh@host/y": "zip://x::sftp://***@host/y",
    "https://h/x?a=1&X-Amz-Signature=hush&b=2": "https://h/x?a=1&X-Amz-Signature=***&b=2",
    "['https://h/x?sig=hush', 'https://h?token=hush']": (
        "['https://h/x?sig=***', 'https://h?token=***']"
    ),
    "https://h/x?access_token=hush#y": "https://h/x?access_token=***#y",
}
PLAIN = [
    "s3://b/a:b@c", "http://host:8080/a@b", "['http://h:80', 'me@x']", "http://[::1]:80/a@b",
    "http://[2001:db8::1]/a@b", "zip://x::s3://b/a@c", "https://h/x?tokenizer=b&design=c",
]  # fmt: skip


@pytest.mark.parametrize("text", [*SHOWN, *PLAIN])
def test_a_secret_is_hidden_and_nothing_else(text: str) -> None:
    assert urls.hidden(text) == trackers.plain(text) == SHOWN.get(text, text)
    if text in PLAIN and " " not in text:  # one URL
        assert urls.without_signature(urls.without_password(text)) == text
