"""Right keys and values or none: an entry that is gone, changed or foreign is asked for again, and the answer is the
same."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from chiasm.cache.entry import EntryKey, Sealed
from chiasm.cache.memory import MemoryStore
from chiasm.cache.place import Place
from chiasm.errors import ServerError
from chiasm.local import LocalService
from tests import digits
from tests.asking import ask, question, running, video
from tests.e2e.test_requests import settled


def flipped(sealed: Sealed) -> Sealed:
    payload = bytearray(sealed.payload)
    payload[len(payload) // 2] ^= 1
    return Sealed(sealed.header, memoryview(payload), sealed.tag)


class Meddling(MemoryStore):
    """A store that hands a decoder something else than it was given, `times` times. An encoder only pins."""

    def __init__(self, change: Callable[[Sealed], Sealed | None], times: int) -> None:
        super().__init__(1 << 24)
        self.change = change
        self.times = times

    async def get(self, key: EntryKey, place: Place | None = None) -> Sealed | None:
        sealed = await super().get(key, place)
        if sealed is None or not self.times:
            return sealed
        self.times -= 1
        changed = self.change(sealed)
        if changed is None:
            await self.discard(key)
        return changed


def meddle(service: LocalService, change: Callable[[Sealed], Sealed | None], times: int) -> None:
    store = Meddling(change, times)
    service.store = service.encoder.store = service.decoder.store = store


CHANGES: dict[str, Callable[[Sealed], Sealed | None]] = {
    "gone": lambda sealed: None,
    "bit": flipped,
    "cut": lambda sealed: Sealed(sealed.header, sealed.payload[:-2], sealed.tag),
    "tag": lambda sealed: Sealed(sealed.header, sealed.payload, bytes(32)),
    "header": lambda sealed: Sealed(bytes(len(sealed.header)), sealed.payload, sealed.tag),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_a_doubtful_entry_is_encoded_again_and_the_answer_is_the_same(change: str) -> None:
    clip = digits.shipped_clips()[1]
    request = question("Read the digits.", video(clip.path.read_bytes()))
    async with running() as service:
        right = await ask(service, request)
    async with running() as service:
        meddle(service, CHANGES[change], 2)
        answer = await ask(service, request)
        assert service.encoder.counts.encoded_units == len(clip.digits) + 2
        await settled(service)
    assert answer.ids == right.ids


async def test_an_entry_that_is_doubtful_twice_fails_the_request_and_frees_everything() -> None:
    clip = digits.shipped_clips()[0]
    async with running() as service:
        meddle(service, flipped, 10**6)
        with pytest.raises(ServerError) as caught:
            await ask(service, question("Read the digits.", video(clip.path.read_bytes())))
        assert caught.value.reason == "ENTRY_MISSING"
        assert caught.value.item == "messages[0].content[1]"
        await settled(service)
