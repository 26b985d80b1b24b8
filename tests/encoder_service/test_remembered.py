"""A medium that was encoded before is told by its keys: nobody opens it, and nobody asks for its bytes, but for units
whose entries are gone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

import numpy as np
import pytest

from chiasm.errors import InvalidRequest, ServerError
from chiasm.local import LocalService
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import encoder_pb2 as epb
from router.media import Inline
from tests import digits
from tests.asking import image, running, video
from tests.encoder_service.routing import Fresh, Told, fresh
from tests.media import make

CLIP = digits.shipped_clips()[-1].path.read_bytes()
UNITS = len(digits.shipped_clips()[-1].digits)


def raw_list(count: int = 3, *, times: tuple[int, ...] | None = None) -> pb.Media:
    """A list of raw frames, a second apart."""
    medium = pb.Media(kind=pb.MEDIA_KIND_VIDEO)
    for number in range(count):
        rgb = np.full((64, 64, 3), 20 * number, np.uint8)
        frame = medium.frames.frames.add(data=rgb.tobytes())
        frame.header.raw.size.height = frame.header.raw.size.width = 64
        frame.header.raw.channels = 3
        frame.header.frame_offset.seconds = number if times is None else times[number]
    return medium


def cut() -> bytes:
    """A video of which the last frames are missing, few enough to be served."""
    noise = np.random.default_rng(3).integers(0, 256, (40, 64, 64, 3), np.uint8)
    whole = make.index_first(make.video(noise, options={"g": "1"}))
    return whole[: len(whole) * 97 // 100]


def broken() -> bytes:
    """A video of which two frames in the middle cannot be decoded, as only decoding tells."""
    frames = [make.flat(64, 64, (6 * number,) * 3) for number in range(40)]
    whole = make.video(frames, codec="mjpeg", container="mov", pix_fmt="yuvj420p")
    return make.without(whole, [7, 20])


MEDIA = {
    "video": video(CLIP),
    "image": image(digits.shipped_images()[0][0].read_bytes()),
    "raw list": raw_list(),
    "cut video": video(cut(), fps=10),
    "broken video": video(broken(), fps=10),
    "sampled": video(CLIP, fps=0.5),
}


async def first(service: LocalService, medium: pb.Media, **options: object) -> Told:
    """Encodes a medium that nobody knows."""
    async with fresh(service) as encoder:
        told = await encoder.encode(medium, **options)  # type: ignore[arg-type]
        assert told.end is not None and told.chunks and told.wanted[0], told.error
        return told


async def again(encoder: Fresh, medium: pb.Media, **options: object) -> Told:
    """Asks about it once more, and nobody opens it."""
    told = await encoder.encode(medium, **options)  # type: ignore[arg-type]
    assert told.wanted == [False] and not told.chunks
    assert encoder.sandbox.pids == frozenset(), "no media process was asked"
    assert not told.encoded
    return told


# -- hits --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", MEDIA)
async def test_a_medium_seen_before_is_told_as_it_was_and_opened_by_nobody(what: str) -> None:
    medium = MEDIA[what]
    async with running() as service, fresh(service) as encoder:
        before = await first(service, medium)
        told = await again(encoder, medium)
        assert told.probe == before.probe
        assert [unit.key for unit in told.sized[0].units] == [before.keys[i] for i in range(len(before.keys))]
        assert told.keys == before.keys and told.usage == before.usage
        assert told.end is not None and told.end.usage.units_cached == len(told.keys)
        assert told.end.times.decode_media.ToNanoseconds() == 0
        assert ("truncated" in told.usage.flags) == (what in ("cut video", "broken video"))
        (sized,) = told.sized
        for unit in sized.units:
            unit.ClearField("key")
        sized.revision = before.sized[-1].revision
        assert sized == before.sized[-1] and sized.final
        memo = encoder.servicer.memo
        assert (memo.hits, memo.misses) == (1, 0)
        assert memo.spared == (len(medium.data) or 3 * 64 * 64 * 3)


async def test_what_a_router_had_no_digest_of_is_known_when_it_has() -> None:
    """As an upload that still ran at the first question."""
    async with running() as service, fresh(service) as encoder:
        await first(service, MEDIA["video"], known=False)
        assert len((await again(encoder, MEDIA["video"])).ready) == UNITS


async def test_units_that_nobody_wants_are_not_even_looked_for() -> None:
    async with running() as service, fresh(service) as encoder:
        await first(service, MEDIA["video"])
        for go, units in (
            (epb.EncodeGo(none=True), []),
            (epb.EncodeGo(units=[pb.UnitRange(first=1, count=2), pb.UnitRange(first=5, count=1)]), [1, 2, 5]),
        ):
            hits = service.store.stats().hits
            told = await again(encoder, MEDIA["video"], go=go)
            assert [ready.unit for ready in told.ready] == units
            assert service.store.stats().hits == hits + 2 + len(units), "two records, and an entry each"
            assert told.usage.units == UNITS


async def test_units_go_out_as_credit_comes() -> None:
    async with running() as service, fresh(service) as encoder:
        await first(service, MEDIA["video"])
        assert len((await again(encoder, MEDIA["video"], credit=1)).ready) == UNITS


async def test_a_known_medium_takes_no_turn_of_those_that_are_decoded() -> None:
    async with running() as service, fresh(service) as encoder:
        await first(service, MEDIA["video"])

        async def waits(told: Told) -> None:
            assert (encoder.servicer.turns.waiting, encoder.servicer.turns.running) == (1, 0)

        await again(encoder, MEDIA["video"], before_go=waits)
        assert (encoder.servicer.turns.waiting, encoder.servicer.turns.running) == (0, 0)


# -- other media -------------------------------------------------------------------------------------------------------


async def test_another_tenant_never_hits() -> None:
    async with running() as service, fresh(service) as encoder:
        before = await first(service, MEDIA["video"])
        told = await encoder.encode(MEDIA["video"], root=bytes(32))
        assert told.wanted[0] and told.chunks
        assert not set(told.keys.values()) & set(before.keys.values())
        assert told.encoded == list(range(UNITS))


@pytest.mark.parametrize(
    "other",
    [video(CLIP, fps=0.5), video(CLIP, max_frames=2), raw_list(3, times=(0, 1, 3)), raw_list(2)],
    ids=["fps", "max_frames", "times", "frames"],
)
async def test_another_sampling_or_another_list_is_another_medium(other: pb.Media) -> None:
    async with running() as service, fresh(service) as encoder:
        await first(service, MEDIA["video"])
        await first(service, MEDIA["raw list"])
        told = await encoder.encode(other)
        assert told.wanted[0] and told.chunks
        assert not told.encoded, "all its frames were seen, though"


async def test_another_share_of_the_budgets_is_another_memory() -> None:
    """A sibling takes half of the frames: the medium is known, what becomes of it is not."""
    async with running() as service:
        alone = await first(service, video(CLIP))
        assert alone.probe is not None
        sibling = epb.Sibling(slot=1, probe=alone.probe)
        sibling.probe.eligible_duration.seconds = 100_000
        options = {"others": [sibling]}
        async with fresh(service) as encoder:
            told = await encoder.encode(video(CLIP), **options)  # type: ignore[arg-type]
            assert told.wanted == [False, True] and told.chunks, told
            assert len(told.sized[-1].units) < UNITS
        async with fresh(service) as encoder:
            assert len((await again(encoder, video(CLIP), **options)).ready) == len(told.sized[-1].units)
            assert len((await again(encoder, video(CLIP))).ready) == UNITS


# -- entries that are gone ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [[0], [UNITS - 1], list(range(0, UNITS, 2)), list(range(UNITS))], ids=str)
async def test_only_units_whose_entries_are_gone_are_decoded_and_encoded(lost: list[int]) -> None:
    """They are evicted between the memory of them and their pins."""
    async with running() as service, fresh(service) as encoder:
        before = await first(service, MEDIA["video"])
        encoded = service.encoder.counts.encoded_units

        async def evict(told: Told) -> None:
            for unit in lost:
                await service.store.discard(before.keys[unit])

        told = await encoder.encode(MEDIA["video"], before_go=evict)
        assert told.wanted == [False, True]
        assert sorted(told.encoded) == lost and service.encoder.counts.encoded_units == encoded + len(lost)
        assert told.keys == before.keys and told.usage == before.usage
        assert told.end is not None and told.end.usage.units_cached == UNITS - len(lost)
        assert encoder.servicer.memo.spared == 0
        assert encoder.servicer.turns.running == 0


async def test_frames_that_never_came_shift_no_unit_when_others_are_decoded_again() -> None:
    async with running() as service, fresh(service) as encoder:
        before = await first(service, MEDIA["broken video"])
        assert len(before.keys) == 38
        for unit in (6, 7, 20, 37):
            await service.store.discard(before.keys[unit])
        told = await encoder.encode(MEDIA["broken video"])
        assert sorted(told.encoded) == [6, 7, 20, 37]
        assert told.keys == before.keys and told.usage == before.usage


async def test_entries_are_made_afresh_where_a_decoder_found_them_wanting() -> None:
    async with running() as service, fresh(service) as encoder:
        before = await first(service, MEDIA["video"])
        go = epb.EncodeGo(units=[pb.UnitRange(first=2, count=2)], afresh=True)
        told = await encoder.encode(MEDIA["video"], go=go, credit=1)
        assert told.wanted == [False, True]
        assert told.encoded == [2, 3] and told.keys == {unit: before.keys[unit] for unit in (2, 3)}


async def test_with_credit_for_one_unit_those_that_are_gone_are_brought_too() -> None:
    async with running() as service, fresh(service) as encoder:
        before = await first(service, MEDIA["video"])
        for unit in range(1, UNITS):
            await service.store.discard(before.keys[unit])
        told = await encoder.encode(MEDIA["video"], credit=1)
        assert sorted(told.keys) == list(range(UNITS)) and told.end is not None


# -- what is not to be believed ----------------------------------------------------------------------------------------


async def test_a_digest_that_the_bytes_do_not_have_is_not_remembered() -> None:
    wrong = bytes([9]) * 32
    async with running() as service:
        told = await first(service, MEDIA["video"], digest=wrong)
        assert len(told.ready) == UNITS, "its own medium is encoded all the same"
        for digest in (wrong, None):
            async with fresh(service) as encoder:
                told = await encoder.encode(MEDIA["video"], digest=digest)
                assert told.wanted[0] and told.chunks


async def test_bytes_that_are_not_what_is_remembered_end_the_call_and_the_memory() -> None:
    """The router says of an image that it is the video. It finds out when it has to look."""
    other = pb.Media(kind=pb.MEDIA_KIND_VIDEO, data=digits.shipped_clips()[0].path.read_bytes())
    async with running() as service:
        before = await first(service, MEDIA["video"])
        await service.store.discard(before.keys[3])
        async with fresh(service) as encoder:
            digest = await Inline(MEDIA["video"]).digest()
            with pytest.raises(ServerError) as caught:
                await encoder.encode(other, digest=digest)
            assert (caught.value.reason, caught.value.retryable) == ("MEMO_STALE", True)
            assert service.store.stats().pinned_bytes == 0
        async with fresh(service) as encoder:
            assert (await encoder.encode(MEDIA["video"])).keys == before.keys


async def test_poison_is_refused_whether_or_not_its_digest_is_told() -> None:
    large = video(make.video([make.flat(720, 1280, (number, 0, 0)) for number in range(12)]))
    for known in (False, True):
        async with running() as service, fresh(service) as encoder:
            assert await _poison(encoder, large, known=known) == "POISON_INPUT"
            for told in (await encoder.encode(large, known=True), await encoder.encode(large, known=False)):
                assert isinstance(told.error, InvalidRequest) and told.error.reason == "POISON_INPUT"
                assert encoder.sandbox.pids == frozenset(), "nothing was started for it"
            assert not (await encoder.encode(large)).chunks, "nor was it sent"


async def test_a_medium_that_was_remembered_and_then_turned_poison_is_refused() -> None:
    async with running() as service, fresh(service) as encoder:
        medium = video(make.video([make.flat(720, 1280, (number, 0, 0)) for number in range(12)]))
        before = await first(service, medium)
        await service.store.discard(before.keys[0])
        assert await _poison(encoder, medium, known=True) == "POISON_INPUT"
        told = await encoder.encode(medium)
        assert told.error is not None and not told.chunks and not told.sized


async def _poison(encoder: Fresh, medium: pb.Media, *, known: bool) -> str:
    """Kills whatever opens a medium. Returns why it was refused."""

    async def kill() -> None:
        while True:
            for pid in encoder.sandbox.pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSEGV)
            await asyncio.sleep(0.005)

    killer = asyncio.create_task(kill())
    try:
        told = await encoder.encode(medium, known=known)
    finally:
        killer.cancel()
        await asyncio.gather(killer, return_exceptions=True)
    assert told.error is not None
    return told.error.reason


async def test_a_digest_of_another_length_is_refused() -> None:
    async with running() as service, fresh(service) as encoder:
        with pytest.raises(InvalidRequest) as caught:
            await encoder.encode(MEDIA["video"], digest=b"short")
        assert caught.value.facts == {"field": "file_digest", "value": 5, "range": "32 bytes"}


@pytest.mark.parametrize("go", [epb.EncodeGo(units=[pb.UnitRange(first=1, count=1)]), epb.EncodeGo(none=True)], ids=str)
async def test_a_medium_of_which_others_make_the_rest_is_remembered_whole(go: epb.EncodeGo) -> None:
    async with running() as service, fresh(service) as encoder:
        before = await first(service, MEDIA["video"], go=go)
        assert before.encoded == [run.first for run in go.units]
        told = await encoder.encode(MEDIA["video"])
        assert told.wanted == [False, True], "it is known, and what nobody made is not there"
        assert [unit for unit in range(UNITS) if unit not in told.encoded] == before.encoded
        assert told.usage == before.usage


async def test_a_part_is_told_whether_or_not_the_medium_is_known_and_leaves_no_memory_of_it() -> None:
    go = epb.EncodeGo(units=[pb.UnitRange(first=1, count=2)], part=True)
    async with running() as service:
        for known in (False, True):
            async with fresh(service) as encoder:
                told = await encoder.encode(MEDIA["video"], go=go)
                assert sorted(told.keys) == [1, 2] and told.encoded == ([] if known else [1, 2])
                assert told.end is not None and not told.end.HasField("usage")
                assert told.wanted[0] is not known and encoder.servicer.memo.hits == known
            if not known:
                await first(service, MEDIA["video"])
        async with fresh(service) as encoder:
            told = await encoder.encode(MEDIA["video"], go=epb.EncodeGo(part=True, none=True))
            assert told.end is not None and not told.ready and not told.chunks


async def test_a_medium_that_was_not_decoded_to_its_end_is_not_remembered() -> None:
    async with running() as service, fresh(service) as encoder:

        async def leave(told: Told) -> None:
            raise InterruptedError

        with pytest.raises(InterruptedError):
            await encoder.encode(MEDIA["video"], before_go=leave)
        assert service.store.stats().entries == 0
