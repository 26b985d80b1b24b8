"""Units in, entries out: known ones from the store, equal ones in flight joined, the rest through the model in passes.

A unit goes through stages that all run at the same time: resized and keyed in threads of their own, looked up, queued
(`batcher`), encoded (`device`), sealed and put (`publish`). Here is the way between them, and who waits. It knows
frames and keys. It knows no request, no file and no wire.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, NamedTuple

import torch

from chiasm.attention.choose import varlen
from chiasm.cache.entry import Contract, unit_key
from chiasm.cache.form import Form
from chiasm.cache.place import Place
from chiasm.cache.sealed import EntryKey
from chiasm.cache.store import EntryStore, Lease
from chiasm.cache.tenant import owner
from chiasm.errors import Overloaded, Unavailable
from chiasm.failpoints import Step, nowhere
from chiasm.media.patches import resize
from chiasm.media.types import Rgb
from chiasm.models.entries import contract_of, identity_of
from chiasm.models.family import EncoderHalf, Grid, MediumPlan, Processor, Trunk
from chiasm.models.offloading import Offloading
from chiasm.models.residence import Residence, not_captured
from encoder_service.batcher import Batcher, Share
from encoder_service.bounds import MAX_ELEMENTS, MAX_PATCHES, MAX_UNITS, Bounds, default_patches
from encoder_service.claims import Claims
from encoder_service.counts import EngineCounts
from encoder_service.device import Device, Entry
from encoder_service.flights import Flight, Flights, Unit, Waiter
from encoder_service.publish import Publisher

PASSES: Final = 2
"""Passes of which some unit is neither in the store nor waiting for room in it: one runs while another is sealed."""

RESIZING: Final = 2
"""Threads that resize frames and make keys."""


class Announced(NamedTuple):
    """An entry in the store, pinned, where it lies, and whether it was there already."""

    contract: Contract
    place: Place
    cached: bool


class EncoderEngine:
    """One model on one device. Its methods are called from one event loop; the model runs in a thread of its own.

    Args:
        fingerprint: of the checkpoint (`Checkpoint.fingerprint`).
        workers_secret: what all workers of a fleet share to tag entries, 32 bytes.
        max_patches, max_units, max_elements, max_unit_patches: as of `Bounds`; without `max_patches` it is
            `bounds.default_patches`.
        trunk: computes what the half's own would (`device.Device`), from graphs: a half whose blocks are streamed has
            none, and SettingsError says why.
        forms: of entries that it makes, the one first that is made where nothing else is asked for; by default all that
            there are of its half.
        step: as of `device.Device`.
    """

    def __init__(
        self,
        half: EncoderHalf,
        processor: Processor,
        *,
        fingerprint: str,
        store: EntryStore,
        workers_secret: bytes,
        max_patches: int | None = None,
        max_units: int = MAX_UNITS,
        max_elements: int = MAX_ELEMENTS,
        max_unit_patches: int = MAX_PATCHES,
        trunk: Trunk | None = None,
        forms: Sequence[Form] | None = None,
        step: Step = nowhere,
    ) -> None:
        self.processor = processor
        self.forms = tuple(half.entry_shape.forms if forms is None else forms)
        self.identity = identity_of(processor, fingerprint=fingerprint, dtype=half.dtype)
        self.identity_digest = self.identity.digest()
        self.counts = EngineCounts()
        self.half = half
        self.workers_secret = workers_secret
        if max_patches is None:
            max_patches = default_patches(half.device, torch.get_num_threads())
        self.bounds = Bounds(max_patches, max_units, half.largest_tensor, max_elements, max_unit_patches)
        self.residence = Residence.of(half)
        if trunk is not None and self.residence.streams:
            raise not_captured()
        self.device = Device(half, varlen(half.device, half.dtype, head_dim=half.head_dim), trunk, step=step)
        self.resizing = ThreadPoolExecutor(RESIZING, thread_name_prefix="resize")
        self._flights = Flights()
        self._batcher = Batcher(self.bounds)
        self.publisher = Publisher(store, workers_secret, lambda unit: self.contract(unit.key, unit.grid, unit.form))
        self._offloading = Offloading(
            self.residence,
            lambda work: asyncio.wrap_future(self.device.submit(work)),
            lambda: len(self._flights) > 0,
            captured=trunk is not None,
        )
        self._passes = asyncio.Semaphore(PASSES)
        self._work = asyncio.Event()
        self._claims = Claims(store)
        self._runner: asyncio.Task[None] | None = None
        self._publishing: set[asyncio.Task[None]] = set()
        self._ending = False

    @property
    def store(self) -> EntryStore:
        """Where entries are kept."""
        return self.publisher.store

    @store.setter
    def store(self, store: EntryStore) -> None:
        self.publisher.store = self._claims.store = store

    @property
    def idle(self) -> bool:
        """Whether nobody looks for units to encode: there are none."""
        return self._runner is None or self._runner.done()

    @property
    def in_flight(self) -> int:
        """Units that wait for the model or are in it, or on their way from it into the store."""
        return len(self._flights)

    def bytes_per_token(self, form: Form) -> int:
        """Bytes that a vision token adds to an entry."""
        return self.half.entry_shape.bytes_per_token(form, self.half.dtype)

    def entry_bytes(self, tokens: int, form: Form) -> int:
        """Bytes of an entry of so many vision tokens."""
        return self.half.entry_shape.bytes_of(tokens, form, self.half.dtype)

    def check(self, grid: Grid) -> None:
        """Raises InvalidRequest MEDIA_TOO_LARGE for a unit that no pass could hold."""
        self.bounds.check(grid)

    def share(self, root: bytes, *, key: bytes = b"", priority: int = 0) -> Share:
        """One call's share of the model.

        Args:
            root: of the tenant it is for.
            key: names the tenant for fair shares; by default the root does.
            priority: higher goes first among the calls of the tenant.
        """
        return self._batcher.share(key or owner(root), priority)

    async def announce(
        self,
        frames: Sequence[Rgb],
        plan: MediumPlan,
        *,
        root: bytes,
        lease: Lease,
        form: Form | None = None,
        afresh: bool = False,
        share: Share | None = None,
        shared: bool = False,
    ) -> Announced:
        """Makes sure that the entry of one unit is in the store, pinned while `lease` lasts: `prepare`, then
        `announce_unit`, and as they do."""
        unit = await self.prepare(frames, plan, root=root, form=form)
        return await self.announce_unit(unit, lease=lease, afresh=afresh, share=share, shared=shared)

    async def prepare(self, frames: Sequence[Rgb], plan: MediumPlan, *, root: bytes, form: Form | None = None) -> Unit:
        """The frames of a unit resized, and its key.

        Args:
            frames: (height, width, 3) each as decoded; they are resized to the plan's size.
            root: the tenant's root, under which the key is made.
            form: one of `forms`; by default the first. Of one unit each form is an entry of its own.

        Raises InvalidRequest MEDIA_TOO_LARGE for a unit that no pass could hold.
        """
        self.check(plan.grid)
        if self._ending:
            raise _ending()
        form = self.forms[0] if form is None else form
        return await asyncio.get_running_loop().run_in_executor(self.resizing, self._prepare, frames, plan, root, form)

    async def announce_unit(
        self,
        unit: Unit,
        *,
        lease: Lease,
        afresh: bool = False,
        share: Share | None = None,
        shared: bool = False,
    ) -> Announced:
        """Makes sure that a unit's entry is in the store, pinned while `lease` lasts.

        Args:
            afresh: encodes it whatever the store holds, because a reader found that wanting.
            share: of the call that wants it; by default a call of its own.
            shared: its reader is on another node, as of `EntryStore.put`.

        Raises ServerError NONFINITE if the model produces anything not finite, Overloaded if the store is full,
        Unavailable OFFLOADED if it would have to be encoded and the weights are not on the device. Equal units in
        flight are encoded once; a caller that is cancelled leaves the others alone.
        """
        contract = self.contract(unit.key, unit.grid, unit.form)
        try:
            if unit.key not in self._flights and not afresh:
                look = partial(self.known, contract, lease, root=unit.root, shared=shared)
                known = await look() or await self._claims.wait(unit.key, look)
                if known is not None:
                    return known
            waiter = Waiter(lease, share or self.share(unit.root), shared, asyncio.get_running_loop().create_future())
            return Announced(contract, await self._made(unit, waiter), cached=False)
        except BaseException:
            await self.store.release(unit.key, lease.id)  # the caller will never be told of it
            raise

    async def known(self, contract: Contract, lease: Lease, *, root: bytes, shared: bool = False) -> Announced | None:
        """An entry that the store has, pinned while `lease` lasts. None, and nothing is pinned, if there is none under
        that key, or another than this engine makes. Here, and nowhere else, the store is asked."""
        pinned = await self.store.pin(contract.key, lease, owner=owner(root), shared=shared)
        if pinned is None:
            return None
        if Contract.unpack(pinned.header) != contract:
            self.counts.rejected_headers += 1
            await self.store.release(contract.key, lease.id)
            return None
        self.counts.cached_units += 1
        return Announced(contract, pinned.place, cached=True)

    async def _made(self, unit: Unit, waiter: Waiter) -> Place:
        """Waits for a unit's flight, beginning it if there is none. The last one to leave takes it out of the queue."""
        if self._ending:
            raise _ending()
        flight = self._flights.get(unit.key)  # another caller may have come while the store was asked
        if flight is None:
            self._offloading.check()
            flight = self._flights.begin(unit)
            self._batcher.want(flight, waiter.share)
            self._go()
        else:
            self.counts.joined_units += 1
            if flight.queued:
                self._batcher.want(flight, waiter.share)
        flight.waiters.append(waiter)
        try:
            return await waiter.place
        finally:
            waiter.left = True
            flight.waiters.remove(waiter)
            if flight.queued and self._batcher.leave(flight, waiter.share):
                self._end(flight)
                self.counts.dropped_units += 1

    def _end(self, flight: Flight) -> None:
        """Its unit is in the store, or will not be made here."""
        self._flights.end(flight)
        self._claims.end(flight.unit.key)
        self._work.set()
        self._offloading.finished()

    def _go(self) -> None:
        self._work.set()
        if self._runner is None or self._runner.done():
            self._runner = asyncio.create_task(self._run())

    async def _run(self) -> None:
        """Passes, as long as anybody wants one. Which units are next is decided when the model has room for them."""
        while self._flights:
            await self._passes.acquire()
            self._work.clear()
            batch = self._batcher.take()
            if not batch:
                self._passes.release()
                if self._flights:  # all may have ended, or left, while a pass was waited for
                    await self._work.wait()
                continue
            self.counts.batches.append(len(batch))
            entries = await self.device.encode([(flight.unit.pixels, flight.unit.form) for flight in batch])
            self._publish(batch, entries)

    def _publish(self, batch: Sequence[Flight], entries: Sequence[Entry | Exception]) -> None:
        left = {*batch}

        def passed(flight: Flight) -> None:
            """A unit takes nothing of its pass any more."""
            if flight in left:
                left.remove(flight)
                if not left:
                    self._passes.release()

        for flight, entry in zip(batch, entries, strict=True):
            task = asyncio.create_task(self._finish(flight, entry, passed))
            self._publishing.add(task)
            task.add_done_callback(self._publishing.discard)

    async def _finish(self, flight: Flight, entry: Entry | Exception, passed: Callable[[Flight], None]) -> None:
        """From the model into the store, or to the failure of all who wait."""
        held = False

        def stuck(error: Overloaded) -> None:
            nonlocal held
            passed(flight)  # others' units need not wait for this one's room
            if error.reason != "SHARED_STORE" and not held:  # which concerns readers on other nodes only
                held = True
                self._batcher.hold(flight)

        try:
            if isinstance(entry, Exception):
                raise entry
            await self.publisher.publish(flight, entry, stuck=stuck)
        except asyncio.CancelledError:
            flight.fail(_ending())
            raise
        except Exception as error:
            flight.fail(error)
        else:
            self.counts.encoded_units += 1
        finally:
            self._end(flight)
            if held:
                self._batcher.go_on(flight)
            passed(flight)
            self._work.set()

    async def offload(self) -> None:
        """Takes the weights off the device, when every unit in flight is in the store or has failed. Until they are
        back what the store has is announced, and whatever would have to be encoded is refused with Unavailable
        OFFLOADED. Cancelled while it waits for units it has changed nothing.

        Raises Unsupported OFFLOAD_CAPTURED where passes are CUDA graphs, SettingsError if the host has no room.
        """
        await self._offloading.offload()

    async def load(self) -> None:
        """Brings the weights back. Raises what torch raises if there is no room for them on the device."""
        await self._offloading.load()

    async def close(self) -> None:
        """Ends the pass that is running and fails what waits, and whatever comes."""
        self._ending = True
        for task in [*([self._runner] if self._runner else []), *self._publishing]:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        for flight in self._flights:
            for waiter in tuple(flight.waiters):
                waiter.fail(_ending())
            self._flights.end(flight)
        self._offloading.finished()
        await self._claims.close()
        for end in (self.resizing.shutdown, self.device.close, self.publisher.close):
            await asyncio.to_thread(end)

    def _prepare(self, frames: Sequence[Rgb], plan: MediumPlan, root: bytes, form: Form) -> Unit:
        resized = [
            resize(torch.from_numpy(frame).permute(2, 0, 1).unsqueeze(0), plan.height, plan.width) for frame in frames
        ]
        pixels = torch.cat(resized).contiguous()
        key = unit_key(root, self.identity_digest, plan.grid, [*pixels], form=form, dtype=self.half.dtype)
        return Unit(key, pixels, plan.grid, form, root)

    def contract(self, key: EntryKey, grid: Grid, form: Form) -> Contract:
        """What the entry of a unit is."""
        return contract_of(
            self.half.entry_shape,
            self.processor,
            key=key,
            identity=self.identity_digest,
            dtype=self.half.dtype,
            grid=grid,
            form=form,
        )


def _ending() -> Unavailable:
    return Unavailable("DRAINING", "the worker is ending", retry_after=1.0)
