"""One way to reach a server: limits, keep-alive, balancing and retries as `chiasm.rpc.limits` states them.

It opens channels. Deadlines belong to calls, and what a failed call means is said in `chiasm.rpc.status`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import metadata

import grpc
import grpc.aio

from chiasm.rpc import limits


def user_agent() -> str:
    """The product string of this library, for example `chiasm-python/0.1.0`."""
    return f"chiasm-python/{metadata.version('chiasm')}"


def connect(
    target: str,
    *,
    message_bytes: int = limits.WORKER_MESSAGE_BYTES,
    max_retries: int = 0,
    credentials: grpc.ChannelCredentials | None = None,
    interceptors: Sequence[grpc.aio.ClientInterceptor] = (),
    compression: grpc.Compression | None = None,
    options: Mapping[str, int | str] | None = None,
) -> grpc.aio.Channel:
    """A channel to `target`. Nothing is sent before the first call; use it as an async context manager to close it.

    Args:
        target: a gRPC name, for example `localhost:50051` or `dns:///encoders:50052`.
        message_bytes: bytes of one message, at most, both ways.
        max_retries: how often gRPC repeats a call that nobody had begun to answer; 0 between router and workers.
        credentials: TLS. None is plain text.
        interceptors: of `grpc.aio`, the first outermost.
        compression: of messages sent. Media are compressed already.
        options: gRPC channel options that win over those of `limits`.
    """
    merged: dict[str, int | str] = {
        **dict(limits.channel_options(message_bytes, user_agent=user_agent(), max_retries=max_retries)),
        **(options or {}),
    }
    arguments = tuple(merged.items())
    if credentials is None:
        return grpc.aio.insecure_channel(target, arguments, compression, tuple(interceptors))
    return grpc.aio.secure_channel(target, credentials, arguments, compression, tuple(interceptors))
