"""Sizes and options of every connection, and bounds on what it carries, stated in one place.

gRPC ignores a misspelt option without a word, so a test looks each key up in gRPC itself. This module knows numbers
and names; it opens nothing.
"""

from __future__ import annotations

import json
from typing import Final, TypeAlias

Options: TypeAlias = tuple[tuple[str, int | str], ...]

MIB: Final = 2**20

CHUNK_BYTES: Final = 1 * MIB
"""Bytes of media or of a tensor in one message, at most."""

MAX_SECONDS: Final = 1e9
"""Times and time limits above this (about 30 years) are a unit mistaken, not a recording."""

MAX_FRAMES: Final = 100_000
"""More frames of one video than any file is opened with and any family takes."""

CLIENT_MESSAGE_BYTES: Final = 16 * MIB
"""Bytes of one message between a client and the router. A request may carry small media in line; larger ones are
uploaded. A message is read whole, on the event loop that all streams share, and takes many times its bytes then."""

MEDIA_BYTES: Final = 256 * MIB
"""Bytes of one medium, and of all that a request in this process carries in line."""

TEXT_BYTES: Final = 4 * MIB
"""Bytes of the text of one prompt. It bounds the time that tokenising takes, which grows with the size, whatever the
text is: 3 to 9 s of one core for so much of one letter, of spaces, of digits, of words, of Chinese or of emoji."""

GUIDE_BYTES: Final = 64 * 1024
"""Bytes of a guide: of its schema, its expression, its grammar, or of all its choices. It bounds what compiling one
takes, and how deep one can lead into itself."""

GUIDE_CHOICES: Final = 1024
"""Choices of one guide."""

LISTED_FRAMES: Final = 4096
"""Frames of one list, and times that one video's frames are named by."""

WORKER_MESSAGE_BYTES: Final = 8 * MIB
"""Bytes of one message between router and workers. Media and tensors travel in chunks; the rest is small."""

METADATA_BYTES: Final = 64 * 1024
"""Bytes of the metadata of a call. A status with details must fit, or gRPC puts one of its own in its place."""

KEEPALIVE_MS: Final = 30_000
"""After so long a client asks a silent connection whether it lives."""

KEEPALIVE_TIMEOUT_MS: Final = 15_000
"""A client closes a connection that does not answer within this time."""

SERVER_KEEPALIVE_MS: Final = 5_000
"""The same of a server, which works for whoever has gone without a word until it notices: a cable, a machine, a network
that is parted. A client's processor may be busy for seconds; gRPC answers beside it."""

SERVER_KEEPALIVE_TIMEOUT_MS: Final = 5_000
"""And here. Bytes that were sent and not acknowledged for so long end a connection too (TCP_USER_TIMEOUT), so a client
that is being told something is missed after this time, and a silent one after both together."""

MIN_PING_INTERVAL_MS: Final = 10_000
"""A server takes pings this often. It must lie below KEEPALIVE_MS: a decoder can be silent for long, and three pings
that the server finds too early end every call of the connection."""

RECONNECT_MS: Final = 100
"""After which a connection that failed is tried again at first; then ever more rarely."""

MAX_RECONNECT_MS: Final = 2_000
"""And at least this often. gRPC's own bound of two minutes would keep a worker that came back out of work for as long;
channels of one process to one address share that wait."""

MAX_ATTEMPTS: Final = 5
"""Attempts that gRPC makes at most, whatever a policy says (gRFC A6)."""


def _messages(limit: int) -> Options:
    return (
        ("grpc.max_send_message_length", limit),
        ("grpc.max_receive_message_length", limit),
        ("grpc.max_metadata_size", METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", METADATA_BYTES),
    )


def server_options(message_bytes: int) -> Options:
    """Options of a server that takes messages of up to `message_bytes`."""
    return (
        *_messages(message_bytes),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_time_ms", SERVER_KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", SERVER_KEEPALIVE_TIMEOUT_MS),
        # Two processes on one port would share it silently, each with half of the calls.
        ("grpc.so_reuseport", 0),
    )


def channel_options(message_bytes: int, *, user_agent: str, max_retries: int = 0) -> Options:
    """Options of a channel.

    Args:
        message_bytes: bytes of one message, at most, both ways.
        user_agent: put before gRPC's own, for example `chiasm-python/0.1.0`.
        max_retries: how often gRPC itself sends a call again that ended with UNAVAILABLE before its first header. 0 on
            channels to workers: there the router decides. gRPC makes at most MAX_ATTEMPTS in all.
    """
    assert max_retries >= 0, f"max_retries is {max_retries}"
    return (
        *_messages(message_bytes),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", RECONNECT_MS),
        ("grpc.max_reconnect_backoff_ms", MAX_RECONNECT_MS),
        ("grpc.primary_user_agent", user_agent),
        ("grpc.enable_retries", int(max_retries > 0)),
        ("grpc.service_config", json.dumps(service_config(max_retries))),
    )


def service_config(max_retries: int) -> dict[str, object]:
    """How a channel spreads calls over addresses, and whether it sends one again."""
    config: dict[str, object] = {"loadBalancingConfig": [{"round_robin": {}}]}
    if max_retries:
        config["methodConfig"] = [
            {
                "name": [{}],
                "retryPolicy": {
                    "maxAttempts": min(1 + max_retries, MAX_ATTEMPTS),
                    "initialBackoff": "0.1s",
                    "maxBackoff": "2s",
                    "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ]
    return config
