"""gRPC ignores a misspelt option without a word, so every key is looked up in gRPC itself."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from chiasm.rpc import limits

SERVER = dict(limits.server_options(limits.CLIENT_MESSAGE_BYTES))
CHANNEL = dict(limits.channel_options(limits.CLIENT_MESSAGE_BYTES, user_agent="test", max_retries=2))


@pytest.mark.parametrize("key", sorted({*SERVER, *CHANNEL}))
def test_an_option_is_one_that_grpc_knows(key: str) -> None:
    library = Path(str(importlib.import_module("grpc._cython.cygrpc").__file__)).read_bytes()
    assert key.encode() + b"\0" in library


def test_a_silent_stream_survives_the_clients_pings() -> None:
    assert limits.MIN_PING_INTERVAL_MS < limits.KEEPALIVE_MS
    assert SERVER["grpc.http2.max_ping_strikes"] == 0
    assert SERVER["grpc.keepalive_permit_without_calls"] == 1
    assert SERVER["grpc.http2.min_ping_interval_without_data_ms"] == limits.MIN_PING_INTERVAL_MS
    assert CHANNEL["grpc.http2.max_pings_without_data"] == 0


def test_both_ends_take_what_the_other_sends() -> None:
    for key in ("grpc.max_send_message_length", "grpc.max_receive_message_length", "grpc.max_metadata_size"):
        assert SERVER[key] == CHANNEL[key]
    assert 4 * limits.CHUNK_BYTES <= limits.WORKER_MESSAGE_BYTES


def test_retries_are_off_unless_asked_for_and_never_beyond_what_grpc_does() -> None:
    worker = dict(limits.channel_options(limits.WORKER_MESSAGE_BYTES, user_agent="test"))
    assert worker["grpc.enable_retries"] == 0
    assert "methodConfig" not in json.loads(str(worker["grpc.service_config"]))
    assert CHANNEL["grpc.enable_retries"] == 1
    policy = json.loads(json.dumps(limits.service_config(9)))["methodConfig"][0]["retryPolicy"]
    assert policy["maxAttempts"] == limits.MAX_ATTEMPTS
    assert policy["retryableStatusCodes"] == ["UNAVAILABLE"]
