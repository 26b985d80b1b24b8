"""How a client reaches its server: target, TLS, what goes beside every call, and the options of the channel.

All of it is checked when a client is made, without touching the network. gRPC is loaded when a channel is opened.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from chiasm.client import checks
from chiasm.client.keywords import known_keywords
from chiasm.client.transport import Metadata, Opener, Transport
from chiasm.errors import InvalidRequest
from chiasm.rpc import limits

if TYPE_CHECKING:
    import grpc
    import grpc.aio

TARGET = "localhost:50051"
"""Where a server of this machine listens unless told otherwise."""

CONNECT_TIMEOUT = 5.0
"""Seconds that a call waits for a connection."""

MAX_RETRIES = 2
"""How often a call is sent again that a server which cannot take it now has not begun to answer."""

T = TypeVar("T")

ApiKey: TypeAlias = str | Callable[[], str] | Callable[[], Awaitable[str]]
"""A key, or what makes one for each call: a function, in a thread of its own, or a coroutine function."""

_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.%\w]+\]|[^\s:/\[\]]+):\d{1,5}")
_NAMED = re.compile(r"(dns|ipv4|ipv6|unix|unix-abstract|vsock|passthrough):\S+")
_LOOPBACK = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\]):\d+|unix(-abstract)?:.*")
_KEY = re.compile(r"[a-z0-9_.-]+")
_PRINTABLE = re.compile(r"[ -~]*")


@known_keywords({"ca": "root", "root_certificates": "root", "certificate": "cert", "private_key": "key"})
@dataclass(frozen=True, slots=True, repr=False)
class TLS:
    """Certificates in PEM, each as bytes or as the path of a file, which is read when a client is made.

    Attributes:
        root: whom to trust; None: whom the system trusts.
        cert, key: the client's own, for servers that ask for them.

    Raises InvalidRequest FIELD_MISSING for one of `cert` and `key` without the other.
    """

    root: bytes | str | os.PathLike[str] | None = None
    cert: bytes | str | os.PathLike[str] | None = None
    key: bytes | str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            missing = "cert" if self.cert is None else "key"
            raise InvalidRequest(
                "FIELD_MISSING",
                f"a client's certificate needs both cert and key; {missing} is missing",
                facts={"field": missing},
            )

    def read(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """`root`, `cert` and `key`, files read. Raises OSError."""
        return _pem(self.root), _pem(self.cert), _pem(self.key)

    def __repr__(self) -> str:
        given = [name for name in ("root", "cert", "key") if getattr(self, name) is not None]
        return f"TLS({', '.join(given)})"


class Headers:
    """What goes beside every call of a client: its key and its own metadata.

    Args:
        metadata: names of lower-case letters, digits, `-`, `_` and `.`; printable ASCII, or bytes where a name ends in
            `-bin`.

    Raises InvalidRequest FIELD_OUT_OF_RANGE for a name or value that no header can carry; the value is not shown.
    """

    def __init__(self, api_key: ApiKey | None = None, metadata: Mapping[str, str | bytes] | None = None) -> None:
        if isinstance(api_key, str):
            _check_value("api_key", api_key)
        elif api_key is not None and not callable(api_key):
            raise TypeError(f"api_key is text or a function, not {type(api_key).__name__}")
        self.api_key = api_key
        self.metadata = dict(metadata or {})
        for name, value in self.metadata.items():
            if not _KEY.fullmatch(name) or name.startswith("grpc-"):
                allowed = "lower-case letters, digits, - _ . and not begin with grpc-"
                raise InvalidRequest.out_of_range("the name of a header", name, allowed)
            if not (name.endswith("-bin") and isinstance(value, bytes)):
                _check_value(f"metadata[{name!r}]", value)

    async def __call__(self, request_id: str | None = None) -> Metadata:
        """The metadata of one call. Raises what the caller's own function raises."""
        made = list(self.metadata.items())
        if request_id is not None:
            made.append(("x-request-id", request_id))
        if self.api_key is not None:
            key = self.api_key if isinstance(self.api_key, str) else await _ask(self.api_key)
            _check_value("api_key", key)
            made.append(("authorization", f"Bearer {key}"))
        return tuple(made)


def check_targets(target: str | Sequence[str] | None) -> tuple[str, ...]:
    """The routers that `target`, or the environment (`CHIASM_TARGET`), or TARGET names, each once.

    Args:
        target: names in a sequence, or in one text with commas between them. `ipv4:` and `ipv6:` have their own commas.

    Raises InvalidRequest FIELD_OUT_OF_RANGE for what gRPC would read as something else, as a URL, and for no name.
    """
    given = _or_of_environment(target)
    if isinstance(given, str):
        given = (given,) if given.startswith(("ipv4:", "ipv6:")) else [part.strip() for part in given.split(",")]
    if not isinstance(given, Sequence):
        raise TypeError(f"target is text or a sequence of it, not {type(given).__name__}")
    if not given:
        raise InvalidRequest.out_of_range("target", "", "at least one HOST:PORT")
    return tuple(dict.fromkeys(map(check_target, given)))


def check_target(target: str | None) -> str:
    """One of them. Raises as `check_targets`."""
    given = _or_of_environment(target)
    if not isinstance(given, str):
        raise TypeError(f"target is text, not {type(given).__name__}")
    if not (_NAMED if _NAMED.fullmatch(given) else _ADDRESS).fullmatch(given):
        allowed = "HOST:PORT, unix:PATH or dns:///HOST:PORT, without http://; TLS is tls=True"
        raise InvalidRequest.out_of_range("target", given, allowed)
    return given


def _or_of_environment(target: T | None) -> T | str:
    return os.environ.get("CHIASM_TARGET") or TARGET if target is None else target


def remote(
    target: str,
    *,
    secret: bool,
    tls: bool | TLS | None,
    connect_timeout: float,
    max_retries: int,
    channel_options: Mapping[str, int | str] | None,
    interceptors: Sequence[grpc.aio.ClientInterceptor],
    compression: grpc.Compression | None,
) -> Opener:
    """Opens a channel to `target`, without connecting it.

    Args:
        secret: whether a key goes beside calls; over plain text to another machine that is worth a warning.

    Raises InvalidRequest FIELD_OUT_OF_RANGE, and OSError for a certificate that cannot be read.
    """
    checks.seconds("connect_timeout", connect_timeout)
    checks.whole("max_retries", max_retries, 0, limits.MAX_ATTEMPTS - 1)
    if tls is not None and not isinstance(tls, bool | TLS):
        raise TypeError(f"tls is True, False or TLS(...), not {type(tls).__name__}")
    certificates = (tls if isinstance(tls, TLS) else TLS()).read() if tls else None
    local = _LOOPBACK.fullmatch(target) is not None
    if secret and certificates is None and not local:
        warnings.warn(f"the API key is sent to {target} in plain text; give tls=True", stacklevel=_callers_level())
    options: dict[str, int | str] = {}
    if local:
        options["grpc.enable_http_proxy"] = 0  # a proxy of the environment would look for the server on itself
    options.update(channel_options or {})

    async def open_channel() -> Transport:
        from chiasm.client.remote import Remote
        from chiasm.rpc.channel import connect

        channel = connect(
            target,
            message_bytes=limits.CLIENT_MESSAGE_BYTES,
            max_retries=max_retries,
            credentials=None if certificates is None else _credentials(*certificates),
            interceptors=interceptors,
            compression=compression,
            options=options,
        )
        return Remote(channel, target, connect_timeout)

    return open_channel


def _credentials(root: bytes | None, cert: bytes | None, key: bytes | None) -> grpc.ChannelCredentials:
    import grpc

    return grpc.ssl_channel_credentials(root, key, cert)


def _pem(part: bytes | str | os.PathLike[str] | None) -> bytes | None:
    return part if part is None or isinstance(part, bytes) else Path(part).read_bytes()


async def _ask(key: Callable[[], str] | Callable[[], Awaitable[str]]) -> str:
    # A plain function may wait for a file or a server, and would hold up every other call.
    made: Any = key() if inspect.iscoroutinefunction(key) else await asyncio.to_thread(key)
    return await made if inspect.isawaitable(made) else made  # type: ignore[no-any-return]


def _callers_level() -> int:
    """The `stacklevel` at which a warning points at the line of the caller of this package."""
    level, frame = 1, inspect.currentframe()
    while (frame := frame and frame.f_back) is not None and frame.f_globals["__name__"].startswith("chiasm.client"):
        level += 1
    return level


def _check_value(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name} is text, not {type(value).__name__}")
    if not value or not _PRINTABLE.fullmatch(value):
        raise InvalidRequest(
            "FIELD_OUT_OF_RANGE", f"{name} must be printable ASCII, and not empty", facts={"field": name}
        )
