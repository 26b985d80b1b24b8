"""An entry on its way from the model to those who wait for it: brought to the host, checked, sealed, put, pinned.

Whatever brings it to the host is waited for in threads of its own, so that the model goes on; it is checked and tagged
as the store copies it. It knows the store and who waits. It knows no model and no queue.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

from torch import Tensor

from chiasm.cache.entry import Contract, sealing, tag_secret
from chiasm.cache.place import Place
from chiasm.cache.sealed import Sealable
from chiasm.cache.store import EntryStore
from chiasm.cache.tenant import owner
from chiasm.errors import Overloaded
from chiasm.pulse import Pulse, PulsedThreads
from encoder_service.flights import Flight, Unit, Waiter

THREADS: Final = 2

RETRY: Final = 0.01
"""Seconds between two tries to put into a store that is full of pinned entries."""


class Publisher:
    """Puts entries. Used from one event loop.

    Args:
        secret: what all workers of a fleet share to tag entries.
        contract: what the entry of a unit is.
    """

    def __init__(self, store: EntryStore, secret: bytes, contract: Callable[[Unit], Contract]) -> None:
        self.store = store
        self._secret = secret
        self._contract = contract
        self._threads = PulsedThreads(THREADS, "publish")

    @property
    def pulse(self) -> Pulse:
        """Of what is brought to the host."""
        return self._threads.pulse

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Runs something where entries are brought to the host."""
        return self._threads.submit(work)

    def close(self) -> None:
        """Waits for what is being brought."""
        self._threads.shutdown()

    async def publish(
        self, flight: Flight, entry: Callable[[], Tensor], *, stuck: Callable[[Overloaded], None]
    ) -> None:
        """Puts an entry and tells everybody who waits for it, each once he has his pin. When this returns nobody is
        left who was not told.

        Args:
            entry: brings its payload to the host.
            stuck: called with each refusal of a store that cannot take it for now.

        Raises ServerError NONFINITE, and Overloaded if the store stays full for as long as a lease lasts, or could
        never hold the entry.
        """
        loop = asyncio.get_running_loop()
        sealing = await loop.run_in_executor(self._threads, self._sealing, flight, entry)
        await self._put(sealing, flight, stuck)
        while (waiter := flight.unsettled()) is not None:
            try:
                pinned = await self.store.pin(
                    flight.unit.key, waiter.lease, owner=owner(flight.unit.root), shared=waiter.shared
                )
                if pinned is None:  # whoever it was pinned for has left, and others needed the room
                    await self._put(sealing, flight, stuck)
                else:
                    await self._tell(flight, waiter, pinned.place)
            except Exception as error:
                waiter.fail(error)

    def _sealing(self, flight: Flight, entry: Callable[[], Tensor]) -> Sealable:
        return sealing(self._contract(flight.unit), entry(), tag_secret(self._secret, flight.unit.root))

    async def _put(self, entry: Sealable, flight: Flight, stuck: Callable[[Overloaded], None]) -> None:
        """Puts an entry with the pin of the first who waits, who is told; with none where all have left.

        A store full of pinned entries is waited for: whoever pinned them has room to attach them. So is one that nodes
        share and that does not answer, where the reader is on another node.
        """
        began = time.monotonic()
        while True:
            waiter = flight.unsettled()
            lease = None if waiter is None else waiter.lease
            try:
                place = await self.store.put(
                    entry,
                    flight.unit.key,
                    lease=lease,
                    owner=owner(flight.unit.root),
                    shared=waiter is not None and waiter.shared,
                )
            except Overloaded as error:
                waiter = flight.unsettled()  # somebody may have come, or left, meanwhile
                if not error.retryable or waiter is None or time.monotonic() >= began + waiter.lease.seconds:
                    raise
                stuck(error)
                await asyncio.sleep(error.retry_after or RETRY if error.reason == "SHARED_STORE" else RETRY)
            else:
                if waiter is not None:
                    await self._tell(flight, waiter, place)
                return

    async def _tell(self, flight: Flight, waiter: Waiter, place: Place) -> None:
        """Tells one who waits where the entry lies. He has a pin, which is taken back if he left meanwhile."""
        if waiter.left:
            await self.store.release(flight.unit.key, waiter.lease.id)
        elif not waiter.place.done():
            waiter.place.set_result(place)
