"""The entries of one timeline: held against what was sized, verified, attached where their units are laid, unpinned.

Right keys and values or none: an entry that is absent or doubtful is asked for once more and never used. It knows
stores and contracts, no text and no token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import Tensor

from chiasm.cache import wire
from chiasm.cache.entry import Contract, EntryKey, open_entry, tag_secret
from chiasm.cache.place import Place
from chiasm.errors import ServerError
from chiasm.models.entries import contract_of
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.timeline import UnitName
from decoder_service.model import DecoderModel
from decoder_service.sequence import DecodeSequence


class _Announced(NamedTuple):
    contract: Contract
    place: Place


class Attaching:
    """Entries announced to one sequence.

    Args:
        root: the tenant's root, under which its entries are tagged.
        item_of: the path of a slot's medium in the caller's request, for errors.
    """

    def __init__(
        self, model: DecoderModel, sequence: DecodeSequence, *, root: bytes, item_of: Callable[[int], str | None]
    ) -> None:
        self._model = model
        self._sequence = sequence
        self._secret = tag_secret(model.workers_secret, root)
        self._item_of = item_of
        self._announced: dict[UnitName, _Announced] = {}
        self._waiting: dict[UnitName, None] = {}  # announced and not attached, in order
        self._stale: list[UnitName] = []  # held from before, and of no use any more
        self._pins: dict[UnitName, set[tuple[EntryKey, bytes]]] = {}  # entries and leases that are not given back yet
        self._asked: dict[UnitName, int] = {}  # units asked for again, and how often

    def announce(self, ready: dpb.DecodeReady) -> None:
        """Remembers what an entry is.

        Raises ServerError FEATURE_COUNT_MISMATCH, with both numbers, for one that is not what was sized or not what
        this model reads, ENTRY_CONTRACT for one of another key than it was said to have.
        """
        name = UnitName(ready.slot, ready.unit)
        sized = self._sequence.sized(ready.slot)
        if sized is None or ready.unit >= len(sized.grids):
            raise ServerError("FEATURE_COUNT_MISMATCH", f"unit {ready.unit} of slot {ready.slot} was not sized")
        contract = wire.read(ready.entry, sized.grids[ready.unit])
        # Whatever comes of it: one that is announced twice, or that does not fit, holds a pin all the same.
        self._pins.setdefault(name, set()).add((contract.key, ready.entry.lease.lease_id))
        needed = self._needed(contract.key, contract.grid)
        if contract != needed:
            raise ServerError(
                "FEATURE_COUNT_MISMATCH",
                f"an entry of shape {contract.shape} came where {needed.shape} is needed",
                item=self._item_of(ready.slot),
                facts={"got": contract.shape[3], "needed": needed.shape[3]},
            )
        self._know(name, contract.key)
        self._announced[name] = _Announced(contract, wire.place_of(ready.entry))
        self._waiting[name] = None

    async def resized(self, message: dpb.DecodeSized) -> None:
        """Takes back whatever no longer fits a slot that was sized anew. What merely moved is attached again.

        Raises Overloaded KV_POOL_FULL if there is no room for what moved, ServerError ENTRY_CONTRACT for a unit of
        another key than it had.
        """
        slot, sized = message.slot, self._sequence.sized(message.slot)
        grids = [] if sized is None else sized.grids
        for name, announced in list(self._announced.items()):
            if name.slot == slot and (name.unit >= len(grids) or grids[name.unit] != announced.contract.grid):
                del self._announced[name]
                self._waiting.pop(name, None)
                await self._unpin(name)
        for number, unit in enumerate(message.units):
            if unit.HasField("key"):
                self._know(UnitName(slot, number), unit.key)
        if not self._sequence.relaid:
            return
        # In the device's thread, where units are attached and what a sequence holds is given back.
        for name in await self._model.run(self._model.engine.detach_moved, self._sequence):
            if name in self._announced:
                self._waiting[name] = None
            elif name.slot != slot or name.unit < len(grids):
                self._stale.append(name)

    def _know(self, name: UnitName, key: EntryKey) -> None:
        try:
            self._sequence.know(name, key)
        except ValueError as error:
            raise ServerError("ENTRY_CONTRACT", str(error), item=self._item_of(name.slot)) from None

    async def attach(self) -> list[dpb.DecodeResponse]:
        """Attaches every announced unit that is laid and not attached. Returns what there is to tell of them.

        Raises ServerError ENTRY_MISSING for an entry that is not to be had at the second try either.
        """
        responses = []
        attached = dpb.DecodeAttached()
        for name in list(self._waiting):
            if self._sequence.timeline.find(name) is None:
                continue
            if not self._sequence.attached(name) and not await self._model.hold(self._sequence, name):
                opened = await self._open(*self._announced[name])
                if isinstance(opened, str):
                    await self._ask_again(name, opened)
                    responses.append(_missing(name, opened))
                    continue
                await self._model.attach(self._sequence, name, opened)
            del self._waiting[name]
            await self._unpin(name)
            attached.units.append(pb.UnitRef(slot=name.slot, unit=name.unit))
        for name in self._stale:
            # The caller was told that it is held, and has nothing made for it.
            if not self._sequence.attached(name) and not await self._model.hold(self._sequence, name):
                responses.append(_missing(name, "stale"))
        self._stale.clear()
        if attached.units:
            responses.append(dpb.DecodeResponse(attached=attached))
        return responses

    async def close(self, unread: Iterable[pb.Entry]) -> None:
        """Gives back every pin, those of announcements that nobody read any more too."""
        pins = set().union(*self._pins.values(), ((entry.key, entry.lease.lease_id) for entry in unread))
        for key, lease_id in pins:
            await self._model.store.release(key, lease_id)

    def _needed(self, key: EntryKey, grid: tuple[int, int]) -> Contract:
        engine = self._model.engine
        return contract_of(
            engine.half.entry_shape,
            engine.processor,
            key=key,
            identity=self._model.identity_digest,
            dtype=engine.half.dtype,
            grid=grid,
        )

    async def _ask_again(self, name: UnitName, cause: str) -> None:
        del self._announced[name], self._waiting[name]
        await self._unpin(name)
        self._asked[name] = self._asked.get(name, 0) + 1
        if self._asked[name] > 1:
            raise ServerError("ENTRY_MISSING", f"an entry was {cause} twice", item=self._item_of(name.slot))

    async def _open(self, contract: Contract, place: Place) -> Tensor | str:
        """An entry's payload, verified; or the cause why it is not. A doubtful one is forgotten by the store."""
        sealed = await self._model.store.get(contract.key, place)
        if sealed is None:
            return "absent"
        opened = await asyncio.to_thread(open_entry, sealed, contract, self._secret)
        if isinstance(opened, str):
            await self._model.store.discard(contract.key)
            return "digest" if opened in ("header", "size", "tag") else "contract"
        return opened

    async def _unpin(self, name: UnitName) -> None:
        for key, lease_id in self._pins.pop(name, ()):
            await self._model.store.release(key, lease_id)


def _missing(name: UnitName, cause: str) -> dpb.DecodeResponse:
    return dpb.DecodeResponse(missing=dpb.DecodeMissing(unit=pb.UnitRef(slot=name.slot, unit=name.unit), cause=cause))
