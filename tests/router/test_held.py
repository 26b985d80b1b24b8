"""Units that a decoder holds already: the encoder is not asked for them, and is if the decoder turns out to have lost
them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from chiasm.errors import Unavailable
from chiasm.local import LocalService
from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.rpc.v1 import encoder_pb2 as epb
from tests import digits
from tests.asking import question, running, video
from tests.e2e.test_requests import settled
from tests.router.scripted import Meddle, MeddledFleet, answer

Response = epb.EncodeResponse | dpb.DecodeResponse


def noting(keys: dict[int, bytes]) -> Meddle:
    """Remembers the key of every unit that is announced."""

    def meddle(number: int, response: Response) -> bool:
        assert isinstance(response, epb.EncodeResponse)
        if response.HasField("ready"):
            keys[response.ready.unit] = response.ready.entry.key
        return True

    return meddle


def knowing(keys: dict[int, bytes], units: Sequence[int]) -> Meddle:
    """Says the keys of these units with their sizes, as an encoder does that remembers the file."""

    def meddle(number: int, response: Response) -> bool:
        assert isinstance(response, epb.EncodeResponse)
        if response.HasField("sized"):
            for unit in units:
                response.sized.units[unit].key = keys[unit]
        return True

    return meddle


def asked_for(fleet: MeddledFleet, call: int, count: int) -> list[int]:
    assert fleet.encoders is not None
    go = fleet.encoders.goes[call]
    named = [unit for run in go.units for unit in range(run.first, run.first + run.count)]
    return named if named or go.none else list(range(count))


async def keys_of(service: LocalService, clip: digits.ShippedClip) -> tuple[dict[int, bytes], list[int]]:
    """The keys of a clip's units, once a first question has left them in the decoder, and its answer's ids."""
    keys: dict[int, bytes] = {}
    request = question("Read the digits.", video(clip.path.read_bytes()))
    first = await answer(MeddledFleet(service, encoder=noting(keys)), request)
    assert first.text == clip.answer and len(keys) == len(clip.digits)
    return keys, first.ids


@pytest.mark.parametrize("known", ["all", "some"])
async def test_units_that_the_decoder_holds_are_not_asked_for(known: str) -> None:
    clip = digits.shipped_clips()[-1]
    count = len(clip.digits)
    async with running() as service:
        keys, ids = await keys_of(service, clip)
        await service.store.flush()  # so that whatever is asked for is encoded anew
        encoded = service.encoder.counts.encoded_units
        held = list(range(count)) if known == "all" else list(range(0, count, 2))
        fleet = MeddledFleet(service, encoder=knowing(keys, held))
        got = await answer(fleet, question("Read the digits.", video(clip.path.read_bytes())))
        wanted = [unit for unit in range(count) if unit not in held]
        assert asked_for(fleet, 0, count) == wanted
        assert service.encoder.counts.encoded_units == encoded + len(wanted)
        assert got.ids == ids
        assert got.encoded == len(wanted)
        await settled(service)


async def test_units_that_the_next_decoder_does_not_hold_are_asked_for() -> None:
    """The first one is lost after it has said what it holds."""
    clip = digits.shipped_clips()[-1]
    count = len(clip.digits)
    async with running() as service:
        keys, ids = await keys_of(service, clip)

        def dies(number: int, response: Response) -> bool:
            assert isinstance(response, dpb.DecodeResponse)
            if number == 1 and response.HasField("started"):
                service.decoder.flush()
                raise Unavailable("CONNECTION_LOST", "the connection broke before the stream had ended")
            return True

        fleet = MeddledFleet(service, encoder=knowing(keys, range(count)), decoder=dies)
        got = await answer(fleet, question("Read the digits.", video(clip.path.read_bytes())))
        assert got.ids == ids and fleet.decoders is not None and fleet.decoders.calls == 2
        assert asked_for(fleet, 0, count) == []
        assert asked_for(fleet, 1, count) == list(range(count))
        assert fleet.encoders is not None and not fleet.encoders.goes[1].afresh, "nobody has found them wanting"
        await settled(service)
