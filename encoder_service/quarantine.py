"""Media that ended the processes which opened them are not opened again for a while, for the tenant they came from.

It knows digests and clocks, no media.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

import blake3

from chiasm.errors import InvalidRequest
from chiasm.media.types import Kind

POISON = "POISON_INPUT"


class Quarantine:
    """Remembers poison per tenant.

    Args:
        seconds: how long.
        most: digests remembered; the oldest is forgotten first.
        clock: seconds, monotonic.
    """

    def __init__(
        self, *, seconds: float = 600.0, most: int = 4096, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds = seconds
        self._most = most
        self._clock = clock
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def check(self, tenant: bytes, kind: Kind, data: bytes) -> None:
        """Raises InvalidRequest POISON_INPUT for a medium of that tenant that is remembered. Costs nothing while
        nothing is."""
        now = self._clock()
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)
        if self._until and _digest(tenant, kind, data) in self._until:
            raise InvalidRequest(
                POISON,
                f"this medium ended the processes that opened it; it is not opened for {self._seconds:g} s",
                facts={"seconds": self._seconds},
            )

    def remember(self, tenant: bytes, kind: Kind, data: bytes) -> None:
        """Keeps a medium of a tenant from being opened again."""
        digest = _digest(tenant, kind, data)
        self._until.pop(digest, None)
        self._until[digest] = self._clock() + self._seconds
        if len(self._until) > self._most:
            self._until.popitem(last=False)


def _digest(tenant: bytes, kind: Kind, data: bytes) -> bytes:
    """Of the tenant and of what is opened at once: a file, or one picture of a list, whatever lies beside it."""
    return blake3.blake3(kind.encode(), key=tenant).update(data).digest()
