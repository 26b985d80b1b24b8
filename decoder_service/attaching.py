"""The units of one sequence: attached where they are laid, from the entries of its call or from what is here already,
and so again when it has lost them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.timeline import UnitName
from decoder_service.entries import Entries, Payload
from decoder_service.model import DecoderModel
from decoder_service.seats import Seat
from decoder_service.sequence import DecodeSequence


class Attaching:
    """The units of one sequence, attached where they are laid.

    Args:
        entries: of its call; several sequences may attach the same.
    """

    def __init__(self, model: DecoderModel, seat: Seat[DecodeSequence], entries: Entries) -> None:
        self._model = model
        self._seat = seat
        self._sequence = seat.sequence
        self._entries = entries
        self._waiting: dict[UnitName, None] = {}  # to be attached, in order
        self._stale: dict[UnitName, None] = {}  # was here and is gone, and nothing has been announced of it

    def announced(self, name: UnitName) -> None:
        """A unit's entry may be read."""
        self._stale.pop(name, None)
        self._waiting[name] = None

    def unfit(self, names: Iterable[UnitName]) -> None:
        """What was announced of these units is void."""
        for name in names:
            self._waiting.pop(name, None)

    async def moved(self) -> None:
        """Something was laid anew. What merely moved is attached again. Raises as `Holdings.detach_moved`."""
        if self._sequence.relaid:
            # In the device's thread, where units are attached and what a sequence holds is given back.
            for name in await self._model.run(self._model.engine.detach_moved, self._sequence):
                if (sized := self._sequence.sized(name.slot)) is not None and name.unit < len(sized.grids):
                    self._again(name)

    def lost(self) -> None:
        """The sequence has lost all it held. Every unit is to be attached again."""
        self._waiting.clear()
        for unit in self._sequence.timeline.units:
            self._again(unit.name)

    def _again(self, name: UnitName) -> None:
        """A unit that is neither announced nor excused is still to come."""
        if self._entries.announced(name):
            self._waiting[name] = None
        elif self._entries.excused(name):
            self._stale[name] = None

    async def attach(self) -> list[dpb.DecodeResponse]:
        """Attaches every unit that can be. Returns what there is to tell of them.

        Raises ServerError ENTRY_MISSING for an entry that is not to be had at the second try either.
        """
        responses: list[dpb.DecodeResponse] = []
        attached: list[UnitName] = []
        while reading := await self._read(responses, attached):
            works = [partial(self._model.engine.attach, self._sequence, name, *payload) for name, payload in reading]
            if not await self._model.stepping.attach(self._seat, works):
                break  # it has given way; everything is to be attached again
            await self._settle([name for name, _ in reading], attached)
        for name in list(self._stale):
            # The caller was told that it is held, and has nothing made for it.
            if self._sequence.attached(name) or self._model.hold(self._seat, name):
                del self._stale[name]
            elif self._seat.admitted:
                del self._stale[name]
                responses += await self._entries.ask_again(name, "stale")
        if attached:
            units = [pb.UnitRef(slot=name.slot, unit=name.unit) for name in attached]
            responses.append(dpb.DecodeResponse(attached=dpb.DecodeAttached(units=units)))
        return responses

    async def _read(
        self, responses: list[dpb.DecodeResponse], attached: list[UnitName]
    ) -> list[tuple[UnitName, Payload]]:
        """The payloads of the next units that are laid and not here, as many as a step attaches."""
        reading: list[tuple[UnitName, Payload]] = []
        for name in list(self._waiting):
            if len(reading) == self._model.scheduler.max_units or not self._seat.admitted:
                break
            if self._sequence.timeline.find(name) is None:
                continue
            if self._sequence.attached(name) or self._model.hold(self._seat, name):
                await self._settle([name], attached)
                continue
            if not self._entries.announced(name):  # another sequence has asked for it again
                del self._waiting[name]
                continue
            opened = await self._entries.read(name)
            if isinstance(opened, str):
                del self._waiting[name]
                responses += await self._entries.ask_again(name, opened)
            else:
                reading.append((name, opened))
        return reading if self._seat.admitted else []

    async def _settle(self, names: Iterable[UnitName], attached: list[UnitName]) -> None:
        for name in names:
            del self._waiting[name]
            self._entries.attached(name)
            await self._entries.unpin(name)
            attached.append(name)
