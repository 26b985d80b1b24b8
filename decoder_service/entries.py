"""The entries announced to one call: held against what was sized, verified when they are read, unpinned.

Right keys and values or none: an entry that is absent or doubtful is asked for once more and never used. It knows
stores and contracts, no text and no token.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

from torch import Tensor

from chiasm.cache import wire
from chiasm.cache.entry import Contract, open_entry, tag_secret
from chiasm.cache.place import Place
from chiasm.cache.sealed import EntryKey
from chiasm.errors import ServerError
from chiasm.models.entries import contract_of
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.timeline import UnitName, unit_name
from decoder_service.model import DecoderModel
from decoder_service.sequence import DecodeSequence

_Pin: TypeAlias = tuple[EntryKey, bytes]
"""An entry and the lease on it."""


class _Announced(NamedTuple):
    """Of which its contract follows."""

    key: EntryKey
    grid: tuple[int, int]
    place: Place


class Entries:
    """The entries announced to one call, and the pins on them.

    Args:
        root: the tenant's root, under which its entries are tagged.
        item_of: the path of a slot's medium in the caller's request, for errors.
    """

    def __init__(self, model: DecoderModel, *, root: bytes, item_of: Callable[[int], str | None]) -> None:
        self._model = model
        self._secret = tag_secret(model.workers_secret, root)
        self._item_of = item_of
        self._announced: dict[UnitName, _Announced] = {}
        self._pins: dict[UnitName, tuple[_Pin, ...]] = {}  # that are not given back yet, each once
        self._asked: Counter[UnitName] = Counter()  # units asked for again, and how often
        self._coming: set[UnitName] = set()  # asked for again, and not announced since
        self._excused: set[UnitName] = set()  # the caller was told that they need not be made

    def announce(self, ready: dpb.DecodeReady, sequence: DecodeSequence) -> UnitName:
        """Remembers what an entry is. Returns its unit.

        Raises ServerError FEATURE_COUNT_MISMATCH, with both numbers, for one that is not what was sized or not what
        this model reads, ENTRY_CONTRACT for one of another key than it was said to have.
        """
        name = unit_name(ready.slot, ready.unit)
        sized = sequence.sized(ready.slot)
        if sized is None or ready.unit >= len(sized.grids):
            raise ServerError("FEATURE_COUNT_MISMATCH", f"unit {ready.unit} of slot {ready.slot} was not sized")
        contract = wire.read(ready.entry, sized.grids[ready.unit])
        # Whatever comes of it: one that is announced twice, or that does not fit, holds a pin all the same.
        pin, pins = (contract.key, ready.entry.lease.lease_id), self._pins.get(name, ())
        if pin not in pins:
            self._pins[name] = (*pins, pin)
        needed = self._needed(contract.key, contract.grid)
        if contract != needed:
            raise ServerError(
                "FEATURE_COUNT_MISMATCH",
                f"an entry of shape {contract.shape} came where {needed.shape} is needed",
                item=self._item_of(ready.slot),
                facts={"got": contract.shape[3], "needed": needed.shape[3]},
            )
        self.know(sequence, name, contract.key)
        self._coming.discard(name)
        self._announced[name] = _Announced(contract.key, contract.grid, wire.place_of(ready.entry))
        return name

    def know(self, sequence: DecodeSequence, name: UnitName, key: EntryKey) -> None:
        """Says which entry a unit is. Raises ServerError ENTRY_CONTRACT if it was another one."""
        try:
            sequence.know(name, key)
        except ValueError as error:
            raise ServerError("ENTRY_CONTRACT", str(error), item=self._item_of(name.slot)) from None

    def announced(self, name: UnitName) -> bool:
        return name in self._announced

    def excuse(self, names: Iterable[UnitName]) -> None:
        """The caller is told that these units are held, and has nothing made for them."""
        self._excused.update(names)

    def excused(self, name: UnitName) -> bool:
        """Nothing comes of a unit unless it is asked for."""
        return name in self._excused

    async def resized(self, slot: int, grids: Sequence[tuple[int, int]]) -> list[UnitName]:
        """Takes back whatever no longer fits a slot that was sized anew. Returns the units."""
        unfit = [
            name
            for name, announced in self._announced.items()
            if name.slot == slot and (name.unit >= len(grids) or grids[name.unit] != announced.grid)
        ]
        for name in unfit:
            del self._announced[name]
            await self.unpin(name)
        return unfit

    async def read(self, name: UnitName) -> Tensor | str:
        """The payload of an announced unit, verified; or the cause why it is not to be had. A doubtful one is forgotten
        by the store."""
        key, grid, place = self._announced[name]
        contract = self._needed(key, grid)
        sealed = await self._model.store.get(key, place)
        if sealed is None:
            self._model.rejections.absent += 1
            return "absent"
        opened = await asyncio.to_thread(open_entry, sealed, contract, self._secret)
        if isinstance(opened, str):
            self._model.rejections.note(key, opened)
            await self._model.store.discard(key)
            return "digest" if opened in ("header", "size", "tag") else "contract"
        return opened

    async def ask_again(self, name: UnitName, cause: str) -> list[dpb.DecodeResponse]:
        """Asks for a unit once more, unless another sequence has done so. Raises ServerError ENTRY_MISSING at the
        second time."""
        if name in self._coming:
            return []
        self._announced.pop(name, None)
        self._excused.discard(name)
        self._coming.add(name)
        await self.unpin(name)
        self._asked[name] += 1
        if self._asked[name] > 1:
            raise ServerError("ENTRY_MISSING", f"an entry was {cause} twice", item=self._item_of(name.slot))
        missing = dpb.DecodeMissing(unit=pb.UnitRef(slot=name.slot, unit=name.unit), cause=cause)
        return [dpb.DecodeResponse(missing=missing)]

    def attached(self, name: UnitName) -> None:
        """An entry was good: if it should be needed again it may be asked for again."""
        self._asked.pop(name, None)

    async def unpin(self, name: UnitName) -> None:
        for key, lease_id in self._pins.pop(name, ()):
            await self._model.store.release(key, lease_id)

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
