"""Units in, entries out: known ones from the store, equal ones in flight joined, the rest batched through the model.

It knows frames, keys and the store. It knows no request, no file and no wire.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from chiasm.attention.torch_backend import TorchVarlen
from chiasm.cache.entry import Contract, seal, tag_secret, unit_key
from chiasm.cache.place import Place
from chiasm.cache.sealed import EntryKey, Sealed
from chiasm.cache.store import EntryStore, Lease
from chiasm.cache.tenant import owner
from chiasm.errors import Overloaded, Unavailable
from chiasm.media.patches import resize
from chiasm.media.types import Rgb
from chiasm.models.entries import contract_of, identity_of
from chiasm.models.family import EncoderHalf, MediumPlan, Processor
from encoder_service.claims import Claims

_RETRY = 0.01
"""Seconds between two tries to put into a store that is full of pinned entries."""


class Announced(NamedTuple):
    """An entry in the store, pinned, where it lies, and whether it was there already."""

    contract: Contract
    place: Place
    cached: bool


@dataclass(eq=False, slots=True)
class _Flight:
    """One unit on its way through the model, and the callers that wait for it."""

    key: EntryKey
    pixels: Tensor
    plan: MediumPlan
    root: bytes
    done: asyncio.Future[Place]
    leases: list[Lease] = field(default_factory=list)
    """Of the callers that wait for it: each gets its pin with the entry."""


@dataclass(slots=True)
class EngineCounts:
    """Since the engine was made."""

    encoded_units: int = 0
    cached_units: int = 0
    joined_units: int = 0
    dropped_units: int = 0
    batches: list[int] = field(default_factory=list)
    """Units of the last thousand passes through the model."""


class EncoderEngine:
    """One model on one device. Its methods are called from one event loop; the model runs in a thread of its own.

    Args:
        fingerprint: of the checkpoint (`Checkpoint.fingerprint`).
        workers_secret: what all workers of a fleet share to tag entries, 32 bytes.
        max_patches: patches of one pass through the model; a larger unit goes alone.
    """

    def __init__(
        self,
        half: EncoderHalf,
        processor: Processor,
        *,
        fingerprint: str,
        store: EntryStore,
        workers_secret: bytes,
        max_patches: int = 16_384,
    ) -> None:
        self.processor = processor
        self.identity = identity_of(half.entry_shape, processor, fingerprint=fingerprint, dtype=half.dtype)
        self.identity_digest = self.identity.digest()
        self.counts = EngineCounts()
        self.half = half
        self.store = store
        self._claims = Claims(store)
        self._secret = workers_secret
        self.max_patches = max_patches
        self._attention = TorchVarlen()
        self._flying: dict[EntryKey, _Flight] = {}
        self._queue: list[_Flight] = []
        self._runner: asyncio.Task[None] | None = None
        self.device = ThreadPoolExecutor(1, thread_name_prefix="encoder")

    @property
    def in_flight(self) -> int:
        """Units that wait for the model or are in it."""
        return len(self._flying)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of an entry per vision token."""
        return self.half.entry_shape.bytes_per_token(self.half.dtype)

    async def announce(
        self, frame: Rgb, plan: MediumPlan, *, root: bytes, lease: Lease, afresh: bool = False
    ) -> Announced:
        """Makes sure that one frame's entry is in the store, pinned while `lease` lasts.

        Args:
            frame: (height, width, 3) as decoded; it is resized to the plan's size.
            root: the tenant's root, under which the key is made.
            afresh: encodes it whatever the store holds, because a reader found that wanting.

        Raises ServerError NONFINITE if the model produces anything not finite, Overloaded if the store is full. Equal
        units in flight are encoded once; a caller that is cancelled leaves the others alone.
        """
        pixels, key = await asyncio.to_thread(self._prepare, frame, plan, root)
        contract = self._contract(key, plan)
        try:
            if key not in self._flying and not afresh:
                look = partial(self._look, contract, lease)
                place = await look() or await self._claims.wait(key, look)
                if place is not None:
                    self.counts.cached_units += 1
                    return Announced(contract, place, cached=True)
            flight = self._flying.get(key)  # another caller may have come while the store was asked
            if flight is None:
                flight = self._begin(_Flight(key, pixels, plan, root, asyncio.get_running_loop().create_future()))
            else:
                self.counts.joined_units += 1
            return Announced(contract, await self._wait(flight, lease), cached=False)
        except BaseException:
            await self.store.release(key, lease.id)  # the caller will never be told of it
            raise

    async def _look(self, contract: Contract, lease: Lease) -> Place | None:
        """Where an entry lies, pinned, if it is there."""
        pinned = await self.store.pin(contract.key, lease)
        return pinned.place if pinned is not None and Contract.unpack(pinned.header) == contract else None

    def _begin(self, flight: _Flight) -> _Flight:
        self._flying[flight.key] = flight
        flight.done.add_done_callback(lambda _: self._claims.end(flight.key))
        self._queue.append(flight)
        if self._runner is None or self._runner.done():
            self._runner = asyncio.create_task(self._run())
        return flight

    async def close(self) -> None:
        """Ends the pass that is running and fails what waits."""
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.gather(self._runner, return_exceptions=True)
        for flight in list(self._flying.values()):
            self._fail(flight, Unavailable("DRAINING", "the worker is ending", retry_after=1.0))
        self._queue.clear()
        await self._claims.close()
        await asyncio.to_thread(self.device.shutdown)

    def _prepare(self, frame: Rgb, plan: MediumPlan, root: bytes) -> tuple[Tensor, EntryKey]:
        chw = torch.from_numpy(frame).permute(2, 0, 1).unsqueeze(0)
        pixels = resize(chw, plan.height, plan.width)[0].contiguous()
        return pixels, unit_key(root, self.identity_digest, plan.grid, [pixels])

    def _contract(self, key: EntryKey, plan: MediumPlan) -> Contract:
        return contract_of(
            self.half.entry_shape,
            self.processor,
            key=key,
            identity=self.identity_digest,
            dtype=self.half.dtype,
            grid=plan.grid,
        )

    async def _wait(self, flight: _Flight, lease: Lease) -> Place:
        """Waits for a flight without owning it; the last one to leave drops it if it has not begun."""
        flight.leases.append(lease)
        try:
            return await asyncio.shield(flight.done)
        finally:
            flight.leases.remove(lease)
            if not flight.leases and not flight.done.done() and flight in self._queue:
                self._queue.remove(flight)
                del self._flying[flight.key]
                flight.done.cancel()
                self.counts.dropped_units += 1

    async def _run(self) -> None:
        while self._queue:
            batch = self._take()
            for flight, entry in zip(batch, await self._pass(batch), strict=True):
                try:
                    if isinstance(entry, Exception):
                        raise entry
                    place = await self._put(entry, flight)
                except Exception as error:
                    self._fail(flight, error)
                else:
                    self.counts.encoded_units += 1
                    del self._flying[flight.key]
                    flight.done.set_result(place)

    async def _pass(self, batch: Sequence[_Flight]) -> list[Sealed | Exception]:
        """One pass through the model. If a batch fails as a whole its units are tried alone: one unit's fault is its
        own, whoever's units it was batched with."""
        run = asyncio.get_running_loop().run_in_executor
        try:
            return await run(self.device, self._encode, batch)
        except Exception as error:
            if len(batch) == 1:
                return [error]
        return [(await self._pass([flight]))[0] for flight in batch]

    async def _put(self, sealed: Sealed, flight: _Flight) -> Place:
        """Puts an entry with a pin for every caller that waits for it, and none where all have left.

        A store full of pinned entries is waited for: whoever pinned them has room to attach them.

        Raises Overloaded if it stays full for as long as a lease lasts, or could never hold the entry.
        """
        began = time.monotonic()
        while True:
            first = flight.leases[0] if flight.leases else None
            try:
                place = await self.store.put(sealed, flight.key, lease=first, owner=owner(flight.root))
            except Overloaded as error:
                if not error.retryable or first is None or time.monotonic() >= began + first.seconds:
                    raise
                await asyncio.sleep(_RETRY)
            else:
                await self._pin(flight, set() if first is None else {first})
                return place

    async def _pin(self, flight: _Flight, held: set[Lease]) -> None:
        """Brings the pins of an entry up to who waits for it when this returns: some come and some leave meanwhile."""
        while (wanted := set(flight.leases)) != held:
            for lease in wanted - held:
                await self.store.pin(flight.key, lease)
            for lease in held - wanted:
                await self.store.release(flight.key, lease.id)
            held = wanted

    def _take(self) -> list[_Flight]:
        """As many units from the front of the queue as fit one pass, one at least."""
        patches = 0
        for count, flight in enumerate(self._queue):
            patches += flight.plan.grid[0] * flight.plan.grid[1]
            if count and patches > self.max_patches:
                break
        else:
            count = len(self._queue)
        batch, self._queue = self._queue[:count], self._queue[count:]
        self.counts.batches = [*self.counts.batches[-999:], len(batch)]
        return batch

    @torch.inference_mode()
    def _encode(self, batch: Sequence[_Flight]) -> list[Sealed | Exception]:
        """Runs in the device thread. One unit's fault is its own: its place holds the exception."""
        results: list[Sealed | Exception] = []
        entries = self.half.encode([flight.pixels for flight in batch], self._attention)
        for flight, entry in zip(batch, entries, strict=True):
            try:
                secret = tag_secret(self._secret, flight.root)
                results.append(seal(self._contract(flight.key, flight.plan), entry.contiguous(), secret))
            except Exception as error:
                results.append(error)
        return results

    def _fail(self, flight: _Flight, error: Exception) -> None:
        self._flying.pop(flight.key, None)
        flight.done.set_exception(error)
        flight.done.exception()  # seen, even if every caller has left
