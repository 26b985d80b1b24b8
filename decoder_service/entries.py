"""The entries announced to one call: held against what was sized, verified when they are read, unpinned.

Right keys and values or none: an entry that is absent or doubtful is asked for once more and never used. It knows
stores and contracts, no text and no token.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, TypeAlias

from torch import Tensor

from chiasm.cache import wire
from chiasm.cache.entry import Contract, Mismatch, open_entry, tag_secret
from chiasm.cache.form import Form
from chiasm.cache.place import Place
from chiasm.cache.sealed import EntryKey
from chiasm.cache.tenant import owner
from chiasm.errors import ServerError
from chiasm.models.entries import contract_of
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.timeline import UnitName, unit_name
from decoder_service.model import DecoderModel
from decoder_service.sequence import DecodeSequence

RETRY_AFTER: Final = 1.0
"""Seconds after which entries that were not to be had may be: a store that nodes share may be down meanwhile."""

_Pin: TypeAlias = tuple[EntryKey, bytes]
"""An entry and the lease on it."""


class _Announced(NamedTuple):
    """Of which its contract follows."""

    key: EntryKey
    form: Form
    grid: tuple[int, int]
    place: Place


class Payload(NamedTuple):
    """Of an entry, verified, and its form."""

    data: Tensor
    form: Form


class Entries:
    """The entries announced to one call, and the pins on them.

    Args:
        root: the tenant's root, under which its entries are tagged.
        item_of: the path of a slot's medium in the caller's request, for errors.
    """

    def __init__(self, model: DecoderModel, *, root: bytes, item_of: Callable[[int], str | None]) -> None:
        self._model = model
        self._secret = tag_secret(model.workers_secret, root)
        self._owner = owner(root)
        self._item_of = item_of
        self._announced: dict[UnitName, _Announced] = {}
        self._pins: dict[UnitName, tuple[_Pin, ...]] = {}  # that are not given back yet, each once
        self._asked: Counter[UnitName] = Counter()  # units asked for again, and how often
        self._found: dict[UnitName, Mismatch | None] = {}  # in what the last entry that was doubtful differed
        self._coming: set[UnitName] = set()  # asked for again, and not announced since
        self._excused: set[UnitName] = set()  # the caller was told that they need not be made

    def announce(self, ready: dpb.DecodeReady, sequence: DecodeSequence) -> UnitName:
        """Remembers what an entry is. Returns its unit.

        Raises ServerError FEATURE_COUNT_MISMATCH, with the field and both values, for one that is not what was sized or
        not what this model reads, ENTRY_CONTRACT for one of another key than it was said to have.
        """
        name = unit_name(ready.slot, ready.unit)
        sized = sequence.sized(ready.slot)
        grids = () if sized is None else sized.grids
        if ready.unit >= len(grids):
            raise self._mismatch(name, Mismatch("units", f"{ready.unit + 1} or more", str(len(grids))))
        contract = wire.read(ready.entry)
        # Whatever comes of it: one that is announced twice, or that does not fit, holds a pin all the same.
        pin, pins = (contract.key, ready.entry.lease.lease_id), self._pins.get(name, ())
        if pin not in pins:
            self._pins[name] = (*pins, pin)
        if contract.form not in self._model.forms:
            labels = ", ".join(form.label for form in self._model.forms)
            raise self._mismatch(name, Mismatch("form", contract.form.label, labels))
        grid = grids[ready.unit]
        mismatch = contract.mismatch(self._needed(contract.key, contract.form, grid))
        if mismatch is not None:
            raise self._mismatch(name, mismatch)
        self.know(sequence, name, contract.key)
        self._coming.discard(name)
        self._announced[name] = _Announced(contract.key, contract.form, grid, wire.place_of(ready.entry))
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

    async def read(self, name: UnitName) -> Payload | str:
        """The payload of an announced unit, verified; or the cause why it is not to be had. A doubtful one is forgotten
        by the store."""
        key, form, grid, place = self._announced[name]
        contract = self._needed(key, form, grid)
        sealed = await self._model.store.get(key, place, owner=self._owner)
        if sealed is None:
            self._model.rejections.absent += 1
            return "absent"
        opened = await asyncio.to_thread(open_entry, sealed, contract, self._secret)
        if isinstance(opened, str):
            self._model.rejections.note(key, opened)
            await self._model.store.discard(key)
            found = Contract.unpack(sealed.header)
            self._found[name] = None if found is None else found.mismatch(contract)
            return "digest" if opened in ("header", "size", "tag") else "contract"
        return Payload(opened, form)

    async def ask_again(self, name: UnitName, cause: str) -> list[dpb.DecodeResponse]:
        """Asks for a unit once more, unless another sequence has done so. Raises ServerError ENTRY_MISSING at the
        second time: it may be sent again, unless what is there is not what this model reads."""
        if name in self._coming:
            return []
        self._announced.pop(name, None)
        self._excused.discard(name)
        self._coming.add(name)
        await self.unpin(name)
        self._asked[name] += 1
        if self._asked[name] > 1:
            found = self._found.get(name)
            what = f"an entry was {cause} twice" if found is None else f"an entry was found twice with {found}"
            facts = {} if found is None else found._asdict()
            retry_after = None if cause == "contract" else RETRY_AFTER
            item = self._item_of(name.slot)
            raise ServerError("ENTRY_MISSING", what, item=item, retry_after=retry_after, facts=facts)
        missing = dpb.DecodeMissing(unit=pb.UnitRef(slot=name.slot, unit=name.unit), cause=cause)
        return [dpb.DecodeResponse(missing=missing)]

    def attached(self, name: UnitName) -> None:
        """An entry was good: if it should be needed again it may be asked for again."""
        self._asked.pop(name, None)

    async def unpin(self, name: UnitName) -> None:
        """Whoever is cancelled meanwhile leaves what is not given back to `close`."""
        for pin in self._pins.get(name, ()):
            await self._model.store.release(*pin)
            self._pins[name] = tuple(other for other in self._pins.get(name, ()) if other != pin)

    async def close(self, unread: Iterable[pb.Entry]) -> None:
        """Gives back every pin, those of announcements that nobody read any more too."""
        pins = set().union(*self._pins.values(), ((entry.key, entry.lease.lease_id) for entry in unread))
        for key, lease_id in pins:
            await self._model.store.release(key, lease_id)

    def _mismatch(self, name: UnitName, mismatch: Mismatch) -> ServerError:
        return ServerError(
            "FEATURE_COUNT_MISMATCH",
            f"an entry of unit {name.unit} was announced with {mismatch}",
            item=self._item_of(name.slot),
            facts={"unit": name.unit, **mismatch._asdict()},
        )

    def _needed(self, key: EntryKey, form: Form, grid: tuple[int, int]) -> Contract:
        engine = self._model.engine
        return contract_of(
            engine.half.entry_shape,
            engine.processor,
            key=key,
            identity=self._model.identity_digest,
            dtype=engine.half.dtype,
            grid=grid,
            form=form,
        )
