"""Kinds of values that settings have: addresses to listen on, and targets to reach. It opens none."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, TypeAlias
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator
from pydantic_settings import NoDecode

from chiasm.failpoints import parse


def _host_and_port(value: str, *, lowest: int) -> bool:
    host, _, port = value.rpartition(":")
    return bool(host) and port.isdecimal() and lowest <= int(port) <= 65535


def _address(value: str) -> str:
    if not re.fullmatch(r"unix:.+", value) and not _host_and_port(value, lowest=0):
        raise ValueError("must be HOST:PORT (port 0 takes a free one) or unix:/path/to/socket")
    return value


def _http_address(value: str) -> str:
    if value != "none" and not _host_and_port(value, lowest=0):
        raise ValueError("must be HOST:PORT (port 0 takes a free one), or none")
    return value


def _target(value: str) -> str:
    named = re.fullmatch(r"dns:///(.+)", value)
    if not re.fullmatch(r"unix:.+", value) and not _host_and_port(named[1] if named else value, lowest=1):
        raise ValueError("must be HOST:PORT, dns:///NAME:PORT or unix:/path/to/socket")
    return value


def _redis_url(value: str) -> str:
    try:
        parts = urlsplit(value)
        _ = parts.port
    except ValueError:
        raise ValueError("must be redis://HOST:PORT, rediss://HOST:PORT for TLS, or unix:///path/to/socket") from None
    if parts.password is not None:
        raise ValueError("may name a user (redis://USER@HOST:PORT) and holds no password: that comes from a file")
    server = parts.scheme in ("redis", "rediss") and parts.hostname and parts.path in ("", "/", "/0")
    socket = parts.scheme == "unix" and parts.hostname is None and len(parts.path) > 1
    if not (server or socket) or parts.query or parts.fragment:
        raise ValueError("must be redis://HOST:PORT, rediss://HOST:PORT for TLS, or unix:///path/to/socket")
    return value


def _failpoints(value: str) -> str:
    parse(value)
    return value


def _parts(value: object) -> object:
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


Address: TypeAlias = Annotated[str, AfterValidator(_address)]
"""Where a server listens: `HOST:PORT` or `unix:/path/to/socket`."""

HttpAddress: TypeAlias = Annotated[str, AfterValidator(_http_address)]
"""Where the plain port listens: `HOST:PORT`, or `none`."""

Target: TypeAlias = Annotated[str, AfterValidator(_target)]
"""What a channel takes: `HOST:PORT`, `dns:///NAME:PORT` or `unix:/path/to/socket`."""

Failpoints: TypeAlias = Annotated[str, AfterValidator(_failpoints)]
"""Faults, as `chiasm.failpoints` writes them."""

Targets: TypeAlias = Annotated[tuple[Target, ...], NoDecode, BeforeValidator(_parts)]
"""Targets parted by commas."""

RedisUrl: TypeAlias = Annotated[str, AfterValidator(_redis_url)]
"""A Redis server: `redis://[USER@]HOST[:PORT]`, `rediss://…` for TLS, or `unix://[USER@]/path/to/socket`. Its first
database, and no password."""


def is_private(address: str) -> bool:
    """Whether only this machine can connect to an address: a socket file, or a loopback address."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
