"""Bugs of encoders: keys that say too little, units that are mixed up, media that are taken for others."""

from __future__ import annotations

from typing import Any

import blake3
import torch

import chiasm.cache.entry
import decoder_service.entries
import encoder_service.engine
import encoder_service.memo
import encoder_service.publish
from chiasm.cache.sealing import Sealing
from chiasm.media.listed import Listed
from encoder_service.announcing import Announcing
from encoder_service.device import Device
from encoder_service.engine import EncoderEngine
from encoder_service.flights import Flights
from encoder_service.inbox import Inbox
from encoder_service.memo import Memo
from tests.telltale.plants.planting import Garden, Planted

GARDEN = Garden("encoder")

_ROOT = bytes(32)


@GARDEN("a key of one byte")
def _truncated_key(bug: Planted) -> None:
    def make(before: Any) -> Any:
        def unit_key(*arguments: Any, **named: Any) -> bytes:
            bug.hit()
            return bytes(before(*arguments, **named)[:1]) + bytes(31)

        return unit_key

    bug.patch(encoder_service.engine, "unit_key", make)


@GARDEN("a key of the upper half of the picture")
def _key_of_half_the_pixels(bug: Planted) -> None:
    def make(before: Any) -> Any:
        def unit_key(root: bytes, identity: bytes, grid: Any, pixels: Any, **named: Any) -> Any:
            bug.hit()
            return before(root, identity, grid, [one[:, : one.shape[1] // 2] for one in pixels], **named)

        return unit_key

    bug.patch(encoder_service.engine, "unit_key", make)


@GARDEN("a key that is the same for all grids and sizes of the same bytes")
def _key_without_sizes(bug: Planted) -> None:
    def make(before: Any) -> Any:
        def unit_key(root: bytes, identity: bytes, grid: Any, pixels: Any, **named: Any) -> Any:
            bug.hit()
            flat = [one.reshape(3, 1, -1) for one in pixels]
            return before(root, identity, (1, grid[0] * grid[1]), flat, **named)

        return unit_key

    bug.patch(encoder_service.engine, "unit_key", make)
    # Nor does anybody look at the grid of an entry that was found.
    bug.patch(chiasm.cache.entry.Contract, "mismatch", lambda before: lambda self, needed: None)
    bug.patch(chiasm.cache.entry.Contract, "__eq__", lambda before: lambda self, other: True)


def _secret_of_nobody(bug: Planted) -> None:
    """Tags say nothing of a tenant any more, at either end."""
    for module in (decoder_service.entries, encoder_service.publish, encoder_service.memo):
        bug.patch(module, "tag_secret", lambda before: lambda workers, root: before(workers, _ROOT))


@GARDEN("neither keys nor tags say whose an entry is")
def _key_without_tenant(bug: Planted) -> None:
    def make(before: Any) -> Any:
        def unit_key(root: bytes, *arguments: Any, **named: Any) -> Any:
            bug.hit()
            return before(_ROOT, *arguments, **named)

        return unit_key

    bug.patch(encoder_service.engine, "unit_key", make)
    _secret_of_nobody(bug)


@GARDEN("a medium is remembered whatever its bytes are")
def _memo_of_another_file(bug: Planted) -> None:
    def make(before: Any) -> Any:
        def key(self: Memo, asked: Any, plan: Any = None) -> Any:
            bug.hit()
            return before(self, asked._replace(digest=bytes(32)), plan)

        return key

    bug.patch(Memo, "_key", make)


@GARDEN("a medium is remembered for all tenants")
def _memo_of_another_tenant(bug: Planted) -> None:
    def make(before: Any) -> Any:
        def key(self: Memo, asked: Any, plan: Any = None) -> Any:
            bug.hit()
            return before(self, asked._replace(root=_ROOT), plan)

        return key

    bug.patch(Memo, "_key", make)
    _secret_of_nobody(bug)


@GARDEN("the keys that are remembered are turned round")
def _memo_in_another_order(bug: Planted) -> None:
    def make(before: Any) -> Any:
        async def units(self: Memo, asked: Any, plan: Any) -> Any:
            found = await before(self, asked, plan)
            if found is not None and len(found.sized.units) > 1:
                bug.hit()
                keys = [unit.key for unit in found.sized.units]
                for unit, key in zip(found.sized.units, reversed(keys), strict=True):
                    unit.key = key
            return found

        return units

    bug.patch(Memo, "units", make)


@GARDEN("a unit joins the flight of any other")
def _single_flight_mixes_units(bug: Planted) -> None:
    def make(before: Any) -> Any:
        def get(self: Flights, key: bytes) -> Any:
            found = before(self, key)
            others = [flight for flight in self if flight.unit.key != key]
            if found is None and others:
                bug.hit()
                return others[0]
            return found

        return get

    bug.patch(Flights, "get", make)


@GARDEN("the entries of a pass are dealt out in another order")
def _pass_in_another_order(bug: Planted) -> None:
    def make(before: Any) -> Any:
        def run(self: Device, frames: Any) -> Any:
            made = before(self, frames)
            if len(made) > 1 and len({frame.shape for frame, _ in frames}) == 1:
                bug.hit()
                made.reverse()
            return made

        return run

    bug.patch(Device, "_pass", make)


@GARDEN("a unit is announced as the one after it")
def _units_swapped(bug: Planted) -> None:
    def make(before: Any) -> Any:
        def tell(self: Announcing, number: int, announced: Any, lease: Any) -> Any:
            if number < 2 and self._plan.units > 1:
                bug.hit()
                number = 1 - number
            return before(self, number, announced, lease)

        return tell

    bug.patch(Announcing, "_tell", make)


@GARDEN("an entry is a number off in one place")
def _entry_off_by_one(bug: Planted) -> None:
    def make(before: Any) -> Any:
        def run(self: Device, frames: Any) -> Any:
            bug.hit()
            return [_changed(entry) for entry in before(self, frames)]

        return run

    bug.patch(Device, "_pass", make)


def _changed(entry: Any) -> Any:
    def arrived() -> torch.Tensor:
        payload: torch.Tensor = entry().clone()
        payload.view(-1)[-1] += 1
        return payload

    return arrived


@GARDEN("an entry has a token too few, and nobody counts")
def _entry_too_short(bug: Planted) -> None:
    """The encoder leaves out the last token and says so; neither end counts tokens."""

    def shorter(before: Any) -> Any:
        def run(self: Device, frames: Any) -> Any:
            bug.hit()
            return [lambda entry=entry: entry()[..., :-1, :].contiguous() for entry in before(self, frames)]

        return run

    def contract(before: Any) -> Any:
        def of(self: EncoderEngine, key: bytes, grid: Any, form: Any) -> Any:
            right = before(self, key, grid, form)
            shape = (*right.shape[:3], right.shape[3] - 1, right.shape[4])
            return chiasm.cache.entry.Contract(key, right.identity, form, right.dtype, grid, shape)

        return of

    bug.patch(Device, "_pass", shorter)
    bug.patch(EncoderEngine, "contract", contract)
    bug.patch(chiasm.cache.entry.Contract, "mismatch", lambda before: lambda self, needed: None)


@GARDEN("all frames of a list are the first one")
def _first_frame_for_all(bug: Planted) -> None:
    def make(before: Any) -> Any:
        async def opened(self: Listed, frame: Any) -> Any:
            made = await before(self, frame)
            first = self.__dict__.setdefault("_planted", made.rgb)
            if first is not made.rgb:
                bug.hit()
            return type(made)(made.index, made.offset, first)

        return opened

    bug.patch(Listed, "open", make)


@GARDEN("the last medium that came is opened again")
def _bytes_of_the_last_call(bug: Planted) -> None:
    last: list[bytes] = []

    def make(before: Any) -> Any:
        async def frame(self: Inbox) -> Any:
            data = await before(self)
            if last and len(last) % 5 == 0:
                bug.hit()
                data = last[-1]
            last.append(data)
            return data

        return frame

    bug.patch(Inbox, "frame", make)


@GARDEN("pins of a caller that has left are kept")
def _cancel_swallowed_by_encoder(bug: Planted) -> None:
    def make(before: Any) -> Any:
        async def abandon(self: Announcing) -> None:
            bug.hit()

        return abandon

    bug.patch(Announcing, "_abandon", make)


@GARDEN("every unit is said to have been there")
def _everything_was_known(bug: Planted) -> None:
    def make(before: Any) -> Any:
        def tell(self: Announcing, number: int, announced: Any, lease: Any) -> Any:
            bug.hit()
            return before(self, number, announced._replace(cached=True), lease)

        return tell

    bug.patch(Announcing, "_tell", make)


@GARDEN("an entry is tagged over its header alone, at either end", hurt="bytes")
def _digest_of_the_header(bug: Planted) -> None:
    def tag(secret: bytes, header: bytes, payload: Any) -> bytes:
        bug.hit()
        return blake3.blake3(header, key=secret).digest()

    bug.patch(chiasm.cache.entry, "_tag", lambda before: tag)

    def make(before: Any) -> Any:
        def made(self: Any, place: Any) -> bytes:
            before(self, place)
            return tag(self._secret, self.header, self.payload)

        return made

    bug.patch(Sealing, "_made", make)
