"""The secret of a tenant, from which the keys of its entries are made. No torch: routers derive it."""

from __future__ import annotations

from typing import Final

import blake3

from chiasm.cache.framing import framed, u32

LOCAL: Final = "local"
"""The one tenant there is while no keys tell one from another."""


def owner(root: bytes) -> bytes:
    """What a tenant's entries are charged to: 8 bytes that tell nothing of its root."""
    return blake3.blake3(root, derive_key_context="chiasm 2026 owner of entries").digest(8)


def tenant_root(master: bytes, tenant: str, *, epoch: int = 0) -> bytes:
    """The secret under which a tenant's keys are made: 32 bytes. It never leaves router and encoders."""
    derived = blake3.blake3(master, derive_key_context="chiasm 2026 tenant root of entry keys")
    return derived.update(framed([tenant.encode(), u32(epoch)])).digest()
