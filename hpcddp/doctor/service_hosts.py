"""The hosts that the user's trackers and stores need, which nodes must reach."""

from __future__ import annotations

import configparser
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from hpcddp.urls import in_netrc

PORTS = {"http": 80, "https": 443}  # where the address has none


class Service(NamedTuple):
    """A tracker or store.

    Args:
        addresses: variables that hold its address.
        keys: variables with the user's key. If one is set without an address, the usual one counts.
        usual: the usual address.
    """

    addresses: tuple[str, ...]
    keys: tuple[str, ...] = ()
    usual: str = ""


WANDB = Service(("WANDB_BASE_URL",), ("WANDB_API_KEY",), "https://api.wandb.ai")
S3 = Service(
    ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    ("AWS_ACCESS_KEY_ID", "AWS_PROFILE"),
    "https://s3.amazonaws.com",
)
SERVICES = (
    Service(("MLFLOW_TRACKING_URI",)),
    WANDB,
    S3,
    Service(("HF_ENDPOINT",), ("HF_TOKEN",), "https://huggingface.co"),
)


def targets(environ: Mapping[str, str]) -> Iterator[str]:
    """The hosts as host:port.

    Args:
        environ: the user's.
    """
    for service in SERVICES:
        for text in _addresses(service, environ):
            address = urlsplit(text)
            if address.scheme in PORTS and address.hostname:
                yield f"{address.hostname}:{address.port or PORTS[address.scheme]}"


def _addresses(service: Service, environ: Mapping[str, str]) -> list[str]:
    given = [environ[name] for name in service.addresses if environ.get(name)]
    if given or not _used(service, environ):
        return given
    return [(service is S3 and _configured_endpoint(environ)) or service.usual]


def _used(service: Service, environ: Mapping[str, str]) -> bool:
    """Whether the user has credentials of a service."""
    if service is WANDB and environ.get("WANDB_MODE", "online") != "online":
        return False
    login = service is WANDB and in_netrc(str(urlsplit(service.usual).hostname), environ)
    return login or any(environ.get(name) for name in service.keys)


def _configured_endpoint(environ: Mapping[str, str]) -> str:
    """The address in the user's ~/.aws/config, as in data/s3.py, which needs the client."""
    profile = environ.get("AWS_PROFILE") or "default"
    home = Path(environ.get("HOME") or "~").expanduser()
    parser = configparser.RawConfigParser()
    try:
        parser.read(environ.get("AWS_CONFIG_FILE") or home / ".aws" / "config", encoding="utf-8")
    except (OSError, configparser.Error, UnicodeDecodeError):
        return ""
    section = "default" if profile == "default" else f"profile {profile}"
    return parser.get(section, "endpoint_url", fallback="")
