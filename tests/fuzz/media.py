"""Damages media at random and opens them: every end is a decoded medium or a refusal.

The test suite runs a short slice of this; `python -m tests.fuzz.media --minutes 30` runs a long one and prints a line a
minute. Every case has a number from which it can be made again: `--case N` opens that one alone.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from fractions import Fraction

from PIL import Image

from chiasm.errors import InvalidRequest
from chiasm.media.sandbox import Sandbox
from chiasm.media.types import Decoded, Frame, Kind, Limits, MediaSource
from tests.media import make

# POISON_INPUT is not among them: a file that ends the worker is contained, but it is a fault worth looking at.
REASONS = frozenset(
    {
        *("MEDIA_EMPTY", "MEDIA_UNSUPPORTED", "MEDIA_TYPE_MISMATCH", "MEDIA_DECODE_FAILED", "MEDIA_TOO_LARGE"),
        *("NO_FRAMES", "NO_VIDEO_STREAM"),
    }
)
# Small, so that a damaged size costs little, and far above what the undamaged files need.
LIMITS = Limits(max_pixels=4_000_000, cpu_seconds=20.0, memory_bytes=2 * 2**30)

QUICK = {"libsvtav1": {"preset": "11"}, "libx265": {"x265-params": "log-level=none:pools=none"}}


def seeds() -> list[tuple[str, Kind, bytes]]:
    """Undamaged small files: (name, kind, bytes)."""
    scene = make.scene(20, 28)
    rgba = Image.fromarray(scene).convert("RGBA")
    rgba.putalpha(Image.linear_gradient("L").resize((28, 20)))
    moving = [Image.fromarray(make.scene(20, 28, shift)) for shift in (0, 60, 120)]
    steps = make.steps(6)
    found: list[tuple[str, Kind, bytes]] = [
        ("jpeg", "image", make.save(scene, "JPEG", exif=make.exif(6))),
        ("progressive", "image", make.save(scene, "JPEG", progressive=True)),
        ("cmyk", "image", make.save(Image.fromarray(scene).convert("CMYK"), "JPEG")),
        ("png", "image", make.save(rgba, "PNG")),
        ("palette", "image", make.save(Image.fromarray(scene).quantize(16), "PNG", transparency=3)),
        ("webp", "image", make.save(rgba, "WEBP", exif=make.exif(8))),
        ("bmp", "image", make.save(scene, "BMP")),
        ("mpo", "image", make.save(moving[0], "MPO", save_all=True, append_images=moving[1:])),
    ]
    for form in ("GIF", "WEBP", "PNG"):
        data = make.save(moving[0], form, save_all=True, append_images=moving[1:], duration=80)
        found += [(f"moving {form}", "video", data), (f"first of {form}", "image", data)]
    for container, codec in (
        *(("mp4", "libx264"), ("mp4", "mpeg4"), ("matroska", "libx265"), ("webm", "libvpx-vp9"), ("webm", "libvpx")),
        *(("mp4", "libsvtav1"), ("avi", "mpeg4"), ("asf", "wmv2"), ("mpegts", "mpeg2video"), ("flv", "flv")),
    ):
        options = {"libsvtav1": {"preset": "12"}, "libx265": {"x265-params": "log-level=none:pools=none"}}.get(
            codec, {}
        )
        base = Fraction(1, 25)
        found.append(
            (f"{container} {codec}", "video", make.video(steps, container, codec, time_base=base, options=options))
        )
    return found


def damage(data: bytes, chance: random.Random) -> bytes:
    """One to eight of: flipped bytes, numbers set to an extreme, cuts, repeated or removed stretches."""
    torn = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4, 8))):
        if not torn:
            break
        # Headers decide more than pixels do.
        end = len(torn) if chance.random() < 0.6 else min(len(torn), 256)
        at = chance.randrange(end)
        what = chance.randrange(10)
        if what < 5:
            torn[at] ^= 1 << chance.randrange(8)
        elif what < 7:
            width = chance.choice((1, 2, 4, 8))
            extreme = chance.choice((b"\xff", b"\0", b"\x7f", b"\x80", b"\x01"))
            torn[at : at + width] = extreme + (b"\xff" if extreme != b"\0" else b"\0") * (width - 1)
        elif what == 7:
            del torn[at:]
        elif what == 8:
            del torn[at : at + chance.randrange(1, 64)]
        else:
            torn[at:at] = torn[at : at + chance.randrange(1, 64)]
    return bytes(torn)


def case(number: int, files: list[tuple[str, Kind, bytes]]) -> tuple[str, MediaSource]:
    """The damaged file of that number."""
    chance = random.Random(number)
    name, kind, data = files[number % len(files)]
    return f"{number} ({name})", MediaSource(kind, data=damage(data, chance))


async def open_it(sandbox: Sandbox, source: MediaSource) -> str:
    """Probes and decodes a medium; returns `decoded` or the reason it was refused with. Asserts what must hold."""
    try:
        probed = await sandbox.probe(source)
        count = len(probed.frame_offsets)
        assert count >= 1
        assert list(probed.frame_offsets) == sorted(set(probed.frame_offsets))
        planned = sorted({0, count // 2, count - 1})
        events = [event async for event in sandbox.decode(source, planned)]
    except InvalidRequest as error:
        if error.reason not in REASONS or "0x" in error.message:
            raise
        return error.reason
    *shown, ending = events
    assert isinstance(ending, Decoded)
    assert ending.frames == len(shown)
    for event in shown:
        assert isinstance(event, Frame)
        assert event.rgb.shape == (probed.height, probed.width, 3)
    return "decoded"


async def run(numbers: range, seconds: float) -> Counter[str]:
    """Opens the numbered cases until the time is over; returns how they ended."""
    files = seeds()
    ends: Counter[str] = Counter()
    started = spoke = time.monotonic()
    async with Sandbox(limits=LIMITS) as sandbox:
        for number in numbers:
            name, source = case(number, files)
            try:
                ends[await open_it(sandbox, source)] += 1
            except BaseException:
                sys.stderr.write(f"case {name}\n")
                raise
            now = time.monotonic()
            if now - spoke > 60:
                spoke = now
                sys.stdout.write(f"{sum(ends.values())} cases: {dict(ends)}\n")
                sys.stdout.flush()
            if now - started > seconds:
                break
    return ends


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--start", type=int, default=0, help="number of the first case")
    parser.add_argument("--case", type=int, help="open this case alone")
    given = parser.parse_args()
    numbers = range(given.start, 2**62) if given.case is None else range(given.case, given.case + 1)
    ends = asyncio.run(run(numbers, given.minutes * 60))
    sys.stdout.write(f"{sum(ends.values())} cases: {dict(ends)}\n")


if __name__ == "__main__":
    main()
