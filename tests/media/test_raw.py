"""Raw frames and lists of frames (B48 to B55, B88, B96 to B101)."""

from __future__ import annotations

import math

import numpy as np
import pytest

from chiasm.media.sandbox import Sandbox
from chiasm.media.types import RawFrame
from tests.media import make
from tests.media.ask import DEFAULT, listed, opened, refusal

pytestmark = pytest.mark.asyncio(loop_scope="session")


def raw(height: int = 4, width: int = 6, channels: int = 3, size: int | None = None) -> RawFrame:
    count = height * width * channels if size is None else size
    return RawFrame(bytes(index % 251 for index in range(count)), height, width, channels)


@pytest.mark.parametrize("size", [71, 73, 0])
async def test_b48_bytes_must_be_height_times_width_times_channels(sandbox: Sandbox, size: int) -> None:
    error = await refusal(sandbox, listed([raw(), raw(size=size)], (0.0, 1.0)))
    assert (error.reason, error.facts) == ("FRAME_LAYOUT", {"expected": 72, "got": size, "index": 1})


async def test_b49_layout_is_told_and_never_guessed(sandbox: Sandbox) -> None:
    """A 3-pixel-high grey frame and a frame of 3 channels have equal bytes; what was said decides."""
    data = bytes(range(36))
    (grey,), _ = await opened(sandbox, listed([RawFrame(data, 3, 12, 1)], None, "image"))
    (colour,), _ = await opened(sandbox, listed([RawFrame(data, 3, 4, 3)], None, "image"))
    assert np.array_equal(grey.rgb[:, :, 0], np.frombuffer(data, np.uint8).reshape(3, 12))
    assert np.array_equal(colour.rgb, np.frombuffer(data, np.uint8).reshape(3, 4, 3))


async def test_b50_one_three_and_four_channels(sandbox: Sandbox) -> None:
    (grey,), _ = await opened(sandbox, listed([RawFrame(b"\x05\x07", 1, 2, 1)], None, "image"))
    assert grey.rgb.tolist() == [[[5] * 3, [7] * 3]]
    (rgba,), _ = await opened(sandbox, listed([RawFrame(bytes([10, 20, 30, 0, 200, 100, 50, 128]), 1, 2, 4)], (0.0,)))
    assert rgba.rgb.tolist() == [[[255, 255, 255], [227, 177, 152]]]
    assert rgba.rgb.flags.writeable
    assert grey.rgb.flags.writeable


@pytest.mark.parametrize("channels", [0, 2, 5, -3])
async def test_b50_other_channels_are_refused(sandbox: Sandbox, channels: int) -> None:
    error = await refusal(sandbox, listed([RawFrame(bytes(72), 4, 6, channels)], (0.0,)))
    assert (error.reason, error.facts) == ("FRAME_LAYOUT", {"channels": channels, "index": 0})


@pytest.mark.parametrize(("height", "width"), [(0, 4), (4, 0), (-1, 4), (-4, -6)])
async def test_b52_sides_below_one_are_out_of_range(sandbox: Sandbox, height: int, width: int) -> None:
    error = await refusal(sandbox, listed([RawFrame(bytes(72), height, width, 3)], (0.0,)))
    assert error.reason == "FIELD_OUT_OF_RANGE"
    assert error.facts == {"height": height, "width": width, "limit": 1, "index": 0}


@pytest.mark.parametrize("side", [2**16, 2**31, 2**63])
async def test_b52_overflowing_products_are_too_large(sandbox: Sandbox, side: int) -> None:
    error = await refusal(sandbox, listed([RawFrame(bytes(72), side, side, 3)], (0.0,)))
    assert error.reason == "MEDIA_TOO_LARGE"
    assert error.facts == {"pixels": side * side, "limit": DEFAULT.max_pixels, "index": 0}


async def test_b54_frames_of_different_sizes_are_refused(sandbox: Sandbox) -> None:
    lists: list[list[bytes | RawFrame]] = [
        [raw(), raw(), raw(6, 4)],
        [make.save(make.scene(4, 6)), make.save(make.scene(4, 6)), make.save(make.scene(6, 4))],
        [raw(), make.save(make.scene(4, 6), "JPEG"), make.save(make.scene(6, 4))],
    ]
    for parts in lists:
        error = await refusal(sandbox, listed(parts, (0.0, 1.0, 2.0)))
        assert error.reason == "FRAME_LAYOUT"
        assert error.facts == {"index": 2, "height": 6, "width": 4, "first_height": 4, "first_width": 6}


async def test_b54_sizes_are_compared_as_shown(sandbox: Sandbox) -> None:
    turned = make.save(make.scene(6, 4), exif=make.exif(6))
    _, probed = await opened(sandbox, listed([make.save(make.scene(4, 6)), turned], (0.0, 1.0)))
    assert (probed.height, probed.width, probed.flags) == (4, 6, ("orientation_applied",))


@pytest.mark.parametrize("kind", ["image", "video"])
async def test_b55_an_empty_list_has_no_frames(sandbox: Sandbox, kind: str) -> None:
    error = await refusal(sandbox, listed([], (), "image" if kind == "image" else "video"))
    assert error.reason == "NO_FRAMES"


async def test_encoded_and_raw_frames_come_with_the_times_given(sandbox: Sandbox) -> None:
    parts: list[bytes | RawFrame] = [make.save(make.scene(4, 6)), raw(), make.save(make.scene(4, 6, 9), "BMP")]
    source = listed(parts, (0.5, 0.75, 2.0))
    shown, probed = await opened(sandbox, source)
    assert (probed.kind, probed.frame_offsets, probed.duration) == ("video", (0.5, 0.75, 2.0), 2.75)
    assert (probed.found, probed.frames_in_file, probed.animated) == ("BMP,PNG,raw", 3, True)
    assert [(frame.index, frame.offset) for frame in shown] == [(0, 0.5), (1, 0.75), (2, 2.0)]
    assert np.array_equal(shown[0].rgb, make.scene(4, 6))
    assert shown[1].rgb.tobytes() == raw().data
    assert np.array_equal(shown[2].rgb, make.scene(4, 6, 9))
    only_raw, _ = await opened(sandbox, listed([raw(), raw()], (3.0, 4.0)))
    assert (only_raw[1].index, only_raw[1].offset) == (1, 4.0)


async def test_a_broken_picture_in_a_list_is_named(sandbox: Sandbox) -> None:
    good = make.save(make.scene(40, 40), "JPEG")
    error = await refusal(sandbox, listed([good, good[:-200], good], (0.0, 1.0, 2.0)))
    assert (error.reason, error.facts) == ("MEDIA_DECODE_FAILED", {"found": "JPEG", "index": 1})
    error = await refusal(sandbox, listed([good, b"text"], (0.0, 1.0)))
    assert (error.reason, error.facts) == ("MEDIA_UNSUPPORTED", {"found": "unknown", "index": 1})
    error = await refusal(sandbox, listed([good, b""], (0.0, 1.0)))
    assert (error.reason, error.facts) == ("MEDIA_EMPTY", {"index": 1})


async def test_b88_too_many_listed_frames_are_counted_before_they_are_opened(sandbox: Sandbox) -> None:
    error = await refusal(sandbox, listed([b"x"] * 4097, [float(i) for i in range(4097)]))
    assert (error.reason, error.facts) == ("TOO_MANY_ITEMS", {"got": 4097, "limit": 4096})
    error = await refusal(sandbox, listed([raw(), raw()], None, "image"))
    assert (error.reason, error.facts) == ("TOO_MANY_ITEMS", {"got": 2, "limit": 1})


async def test_b96_times_are_never_invented(sandbox: Sandbox) -> None:
    error = await refusal(sandbox, listed([raw(), raw()], None))
    assert (error.reason, error.facts) == ("FIELD_MISSING", {"field": "timestamps or fps"})


async def test_b98_as_many_times_as_frames(sandbox: Sandbox) -> None:
    error = await refusal(sandbox, listed([raw(), raw()], (0.0,)))
    assert (error.reason, error.facts) == ("TIMESTAMPS_INVALID", {"frames": 2, "timestamps": 1})


@pytest.mark.parametrize("second", [0.5, 0.25, -1.0, math.nan, math.inf, -math.inf])
async def test_b99_b100_times_are_finite_and_increase(sandbox: Sandbox, second: float) -> None:
    error = await refusal(sandbox, listed([raw(), raw()], (0.5, second)))
    assert (error.reason, error.facts) == ("TIMESTAMPS_INVALID", {"index": 1})


async def test_b101_absurd_times_are_out_of_range(sandbox: Sandbox) -> None:
    error = await refusal(sandbox, listed([raw(), raw()], (0.0, 1e12)))
    assert (error.reason, error.facts) == ("FIELD_OUT_OF_RANGE", {"index": 1, "seconds": 1e12, "limit": 1e9})
    error = await refusal(sandbox, listed([raw(), raw()], (0.0, 90_000.0)))
    assert (error.reason, error.facts) == ("MEDIA_TOO_LARGE", {"seconds": 90_000.0, "limit": 14_400.0})
