"""Media of a family whose unit is two frames of a video: which frames become which unit, whoever makes it and however
often it is asked for, and what is left where frames cannot be decoded."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

from chiasm.attention.torch_backend import TorchVarlen
from chiasm.cache.entry import open_entry, tag_secret
from chiasm.cache.form import Form
from chiasm.local import LocalService, LocalSettings
from chiasm.media.patches import resize
from chiasm.media.types import Rgb
from chiasm.rpc.times import to_seconds
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import encoder_pb2 as epb
from tests import checkpoints_qwen3_vl
from tests.asking import running, video
from tests.encoder_service.routing import ROOT, Fresh, Told, fresh
from tests.media import make

FLOAT32 = LocalSettings(dtype=torch.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints_qwen3_vl.write(tmp_path_factory.mktemp("spans") / "pairs")


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[LocalService, Fresh]]:
    async with running(str(folder), FLOAT32) as service, fresh(service) as encoder:
        yield service, encoder


def pictures(count: int, seed: int = 0) -> list[Rgb]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, (64, 96, 3), dtype=np.uint8) for _ in range(count)]


def listed(frames: Sequence[Rgb], *, kind: pb.MediaKind.ValueType = pb.MEDIA_KIND_VIDEO) -> pb.Media:
    """Raw frames, a second apart."""
    medium = pb.Media(kind=kind)
    for number, rgb in enumerate(frames):
        frame = medium.frames.frames.add(data=rgb.tobytes())
        frame.header.raw.size.height, frame.header.raw.size.width, frame.header.raw.channels = rgb.shape
        if kind == pb.MEDIA_KIND_VIDEO:
            frame.header.frame_offset.seconds = number
    return medium


def film(count: int, missing: Sequence[int] = ()) -> pb.Media:
    """A file of so many frames, ten a second, of which some cannot be decoded, as only decoding tells."""
    frames = [make.flat(64, 64, (6 * number,) * 3) for number in range(count)]
    whole = make.video(frames, codec="mjpeg", container="mov", pix_fmt="yuvj420p")
    return video(make.without(whole, list(missing)) if missing else whole, fps=10)


def frames_of(sized: epb.EncodeSized) -> list[list[int]]:
    """Numbers in the file, unit by unit."""
    return [[frame.file_index for frame in unit.frames] for unit in sized.units]


async def entry_of(service: LocalService, told: Told, unit: int) -> torch.Tensor:
    """(tokens, hidden), as it is stored."""
    (ready,) = [ready for ready in told.ready if ready.unit == unit]
    (grid,) = {(unit.grid.h, unit.grid.w) for unit in told.sized[-1].units}
    sealed = await service.store.get(ready.entry.key)
    assert sealed is not None
    contract = service.encoder.contract(ready.entry.key, grid, Form.STATES)
    opened = open_entry(sealed, contract, tag_secret(service.encoder.workers_secret, ROOT))
    assert isinstance(opened, torch.Tensor), opened
    return opened


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8])
async def test_two_frames_are_a_unit_and_an_odd_one_stands_for_both(folder: Path, count: int) -> None:
    shown = pictures(count)
    async with served(folder) as (service, encoder):
        told = await encoder.encode(listed(shown))
        units = [list(range(at, min(at + 2, count))) for at in range(0, count, 2)]
        assert frames_of(told.sized[-1]) == units and sorted(told.keys) == list(range(len(units)))
        usage = told.usage
        size = usage.resized_size
        assert (usage.frames_used, usage.units, usage.grid.t) == (count, len(units), len(units))
        assert [to_seconds(offset) for offset in usage.frame_offsets] == list(range(count))
        assert usage.tokens == len(units) * (size.height // 32) * (size.width // 32)
        half = service.encoder.half
        for unit, numbers in enumerate(units):
            frames = [torch.from_numpy(shown[number]).permute(2, 0, 1).unsqueeze(0) for number in numbers]
            resized = torch.cat([resize(frame, size.height, size.width) for frame in frames])
            stored = await entry_of(service, told, unit)
            with torch.inference_mode():
                (expected,) = half.encode_states([resized], TorchVarlen())
                (twice,) = half.encode_states([resized[[0, -1]]], TorchVarlen())
            torch.testing.assert_close(stored, expected, rtol=1e-5, atol=1e-5)
            assert torch.equal(expected, twice)


async def test_a_frame_is_another_unit_beside_another_one_or_alone(folder: Path) -> None:
    a, b, c = pictures(3)
    async with served(folder) as (service, encoder):
        # Four frames of one size each: nothing but the pairs differs.
        told = [
            await encoder.encode(listed(frames)) for frames in ([a, b, c, c], [b, a, c, c], [a, b, a, c], [a, b, c])
        ]
        sizes = {(one.usage.resized_size.height, one.usage.resized_size.width) for one in told}
        assert len(sizes) == 1
        (ab, cc), (ba, cc2), (ab2, ac), (ab3, lone) = ([one.keys[0], one.keys[1]] for one in told)
        assert ab == ab2 == ab3 and cc == cc2
        assert len({ab, ba, cc, ac}) == 4
        assert lone not in (ab, ba, ac)
        assert service.encoder.counts.encoded_units == len({ab, ba, cc, ac, lone})


@pytest.mark.parametrize(("count", "missing"), [(20, [7, 13]), (20, [7]), (21, [7]), (20, [19]), (20, [18, 19])])
async def test_frames_that_cannot_be_decoded_leave_no_gap_in_any_unit_and_are_remembered_so(
    folder: Path, count: int, missing: list[int]
) -> None:
    medium, came = film(count, missing), [number for number in range(count) if number not in missing]
    units = [came[at : at + 2] for at in range(0, len(came), 2)]
    async with served(folder) as (service, encoder):
        told = await encoder.encode(medium)
        first, last = told.sized
        assert list(chain(*frames_of(first))) == list(range(count)) and not first.final
        assert frames_of(last) == units and last.final
        assert sorted(told.keys) == list(range(len(units)))
        assert "truncated" in told.usage.flags and told.usage.frames_used == len(came)
        again = await encoder.encode(medium)
        assert again.wanted == [False] and not again.encoded
        assert again.keys == told.keys and again.usage == told.usage and frames_of(again.sized[-1]) == units
        lost = {0, 3, len(units) - 1}
        for unit in lost:
            await service.store.discard(told.keys[unit])
        once_more = await encoder.encode(medium)
        assert once_more.wanted == [False, True] and set(once_more.encoded) == lost
        assert once_more.keys == told.keys and once_more.usage == told.usage


@pytest.mark.parametrize("count", [7, 8])
async def test_a_part_is_whole_units_whoever_makes_the_rest(folder: Path, count: int) -> None:
    medium, units = film(count), (count + 1) // 2
    async with served(folder) as (service, encoder):
        parts = [
            await encoder.encode(medium, go=epb.EncodeGo(units=[pb.UnitRange(first=unit, count=1)], part=True))
            for unit in range(units)
        ]
        assert [sorted(told.keys) for told in parts] == [[unit] for unit in range(units)]
        assert service.encoder.counts.encoded_units == units
        whole = await encoder.encode(medium)
        assert whole.keys == {unit: told.keys[unit] for unit, told in enumerate(parts)} and not whole.encoded
        known = await encoder.encode(medium, go=epb.EncodeGo(units=[pb.UnitRange(first=1, count=2)], part=True))
        assert known.wanted == [False] and sorted(known.keys) == [1, 2]


async def test_a_medium_of_which_others_make_the_rest_is_remembered_whole(folder: Path) -> None:
    medium = film(7)
    async with served(folder) as (_, encoder):
        before = await encoder.encode(medium, go=epb.EncodeGo(units=[pb.UnitRange(first=3, count=1)]))
        assert before.encoded == [3]
        told = await encoder.encode(medium)
        assert told.wanted == [False, True] and sorted(told.encoded) == [0, 1, 2]
        assert told.keys[3] == before.keys[3] and told.usage == before.usage


@pytest.mark.parametrize("lost", [[0], [3], [1, 3]], ids=str)
async def test_entries_are_made_again_or_afresh_of_the_frames_that_they_are_of(folder: Path, lost: list[int]) -> None:
    medium = film(7)
    async with served(folder) as (service, encoder):
        before = await encoder.encode(medium, credit=1)
        assert sorted(before.keys) == [0, 1, 2, 3], "units go out as credit comes"
        kept = {unit: await entry_of(service, before, unit) for unit in lost}
        for unit in lost:
            await service.store.discard(before.keys[unit])
        told = await encoder.encode(medium, credit=1)
        assert sorted(told.encoded) == lost and told.keys == before.keys
        for unit in lost:
            torch.testing.assert_close(await entry_of(service, told, unit), kept[unit], rtol=1e-5, atol=1e-5)
        go = epb.EncodeGo(units=[pb.UnitRange(first=unit, count=1) for unit in lost], afresh=True)
        afresh = await encoder.encode(medium, go=go)
        assert afresh.encoded == lost and afresh.keys == {unit: before.keys[unit] for unit in lost}


async def test_a_picture_is_a_unit_of_one_frame_and_another_one_than_a_video_of_it(folder: Path) -> None:
    (shown,) = pictures(1)
    async with served(folder) as (_, encoder):
        image = await encoder.encode(listed([shown], kind=pb.MEDIA_KIND_IMAGE))
        assert frames_of(image.sized[-1]) == [[0]] and image.usage.units == 1
        assert (await encoder.encode(listed([shown], kind=pb.MEDIA_KIND_FRAME))).keys == image.keys
