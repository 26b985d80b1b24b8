"""Who a worker is, as it tells those who ask (`Info`)."""

from __future__ import annotations

import platform
import secrets
from importlib import metadata
from pathlib import Path

import blake3

from chiasm.rpc.v1 import common_pb2 as pb

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def replica(*, device: str, arena_id: bytes | None = None, shared_store_id: bytes | None = None) -> pb.Replica:
    """This life of this process, under a new id. Made once.

    Args:
        device: for people, for example `cuda:0`.
        arena_id: 16 bytes, of the shared-memory region it has mapped.
        shared_store_id: 16 bytes, of the store that it shares with other nodes.
    """
    return pb.Replica(
        replica_id=secrets.token_bytes(16),
        node_id=node_id(),
        arena_id=arena_id,
        shared_store_id=shared_store_id,
        version=metadata.version("chiasm"),
        device=device,
    )


def node_id() -> str:
    """The node's name and what tells this boot of it from others, for example `gpu-7.3f9a0c51d2e84b66`."""
    boot = _BOOT_ID.read_bytes() if _BOOT_ID.exists() else b""
    return f"{platform.node()}.{blake3.blake3(boot).hexdigest(length=8)}"
