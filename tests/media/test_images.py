"""Bad and odd pictures, one test per row of the list of bad inputs (B1 to B47)."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from chiasm.media.sandbox import Sandbox
from chiasm.media.types import MediaSource, RawFrame
from tests.media import make
from tests.media.ask import DEFAULT, forget_peak, frames, listed, opened, peak_kib, picture, refusal

pytestmark = pytest.mark.asyncio(loop_scope="session")

LIMIT = DEFAULT.max_pixels


async def test_b01_nothing_is_empty(sandbox: Sandbox) -> None:
    assert (await refusal(sandbox, b"")).reason == "MEDIA_EMPTY"


@pytest.mark.parametrize("data", [bytes(range(7, 200)), b"just text", b"<!DOCTYPE html><html></html>", b"\0"])
async def test_b02_what_no_format_begins_with_is_unsupported(sandbox: Sandbox, data: bytes) -> None:
    error = await refusal(sandbox, data)
    assert (error.reason, error.facts) == ("MEDIA_UNSUPPORTED", {"found": "unknown"})


async def test_b03_content_decides_not_the_declared_type(sandbox: Sandbox) -> None:
    source = MediaSource("image", data=make.save(make.scene()), mime_type="image/jpeg")
    assert (await sandbox.probe(source)).found == "PNG"
    (frame,), _ = await frames(sandbox, source)
    assert np.array_equal(frame.rgb, make.scene())


async def test_b04_a_video_is_no_image_and_an_image_no_video(sandbox: Sandbox) -> None:
    error = await refusal(sandbox, make.video(make.steps(2)))
    assert error.reason == "MEDIA_TYPE_MISMATCH"
    assert error.facts == {"declared": "image", "found": "mov,mp4"}
    for form in ("JPEG", "PNG", "BMP", "WEBP"):
        error = await refusal(sandbox, make.save(make.scene(), form), "video")
        assert error.reason == "MEDIA_TYPE_MISMATCH"
        assert error.facts == {"declared": "video", "found": form}
    error = await refusal(sandbox, make.audio("wav", "pcm_s16le"))
    assert error.reason == "MEDIA_TYPE_MISMATCH"
    assert error.facts == {"declared": "image", "found": "WAV"}


NOT_READ = {
    "EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    "FITS": b"SIMPLE  =                    T",
    "WMF": b"\xd7\xcd\xc6\x9a" + bytes(40),
    "PSD": b"8BPS\0\x01" + bytes(40),
    "TIFF": b"II*\0\x08\0\0\0",
    "ICO": b"\0\0\x01\0\x01\0",
    "JPEG 2000": b"\0\0\0\x0cjP  \r\n\x87\n",
    "AVIF": b"\0\0\0\x1cftypavif\0\0\0\0",
    "SVG": b"<?xml version='1.0'?><svg xmlns='http://www.w3.org/2000/svg'/>",
    "PDF": b"%PDF-1.7\n",
}


@pytest.mark.parametrize("form", NOT_READ)
async def test_b05_other_formats_are_named_and_not_tried(sandbox: Sandbox, form: str) -> None:
    error = await refusal(sandbox, NOT_READ[form])
    assert (error.reason, error.facts) == ("MEDIA_UNSUPPORTED", {"found": form})


async def test_b05_a_real_tiff_and_avif_are_not_tried_either(sandbox: Sandbox) -> None:
    for form in ("TIFF", "AVIF"):
        error = await refusal(sandbox, make.save(make.scene(), form))
        assert (error.reason, error.facts) == ("MEDIA_UNSUPPORTED", {"found": form})


async def test_b06_heic_names_the_format_and_what_would_read_it(sandbox: Sandbox) -> None:
    error = await refusal(sandbox, b"\0\0\0\x18ftypheic\0\0\0\0mif1heic")
    assert (error.reason, error.facts) == ("MEDIA_UNSUPPORTED", {"found": "HEIC", "extra": "heif"})
    assert "HEIC" in error.message


@pytest.mark.parametrize("form", ["JPEG", "PNG", "GIF", "BMP", "WEBP"])
async def test_b07_b08_a_cut_file_is_refused_never_filled_with_grey(sandbox: Sandbox, form: str) -> None:
    noise = np.random.default_rng(1).integers(0, 256, (64, 64, 3), np.uint8)
    data = make.save(noise, form)
    for kept in (len(data) - 128, len(data) // 2, 40, 26):
        error = await refusal(sandbox, data[:kept])
        assert (error.reason, error.facts["found"]) == ("MEDIA_DECODE_FAILED", form), kept


async def test_b10_a_png_header_with_a_wrong_checksum_is_refused(sandbox: Sandbox) -> None:
    data = make.PNG + make.ihdr(4, 4, crc=1) + make.chunk(b"IDAT", zlib.compress(bytes(52))) + make.chunk(b"IEND", b"")
    assert (await refusal(sandbox, data)).reason == "MEDIA_DECODE_FAILED"


async def test_b11_junk_after_the_end_changes_nothing(sandbox: Sandbox) -> None:
    data = make.save(make.scene(), "JPEG")
    plain = await picture(sandbox, data)
    assert np.array_equal(plain, await picture(sandbox, data + b"junk" * 500))


@pytest.mark.parametrize("side", [13_300, 12_000, 40_000, 2**31 - 1])
async def test_b12_b13_claimed_pixels_are_refused_from_the_header(sandbox: Sandbox, side: int) -> None:
    data = make.bomb_png(side, side) if side < 20_000 else make.PNG + make.ihdr(side, side, 1, 0)
    before = forget_peak()
    error = await refusal(sandbox, data)
    assert error.reason == "MEDIA_TOO_LARGE"
    assert error.facts == {"pixels": side * side, "limit": 89_478_485}
    assert "89478485" in error.message
    assert str(side * side) in error.message
    assert peak_kib() - before < 64 * 1024


async def test_b13_a_gif_canvas_is_refused_before_it_is_allocated(sandbox: Sandbox) -> None:
    data = make.save(Image.new("P", (2, 2)), "GIF")
    huge = data[:6] + b"\xff\xff\xff\xff" + data[10:]
    error = await refusal(sandbox, huge)
    assert error.reason == "MEDIA_TOO_LARGE"
    assert error.facts == {"pixels": 65535**2, "limit": LIMIT}


async def test_b13_jpeg_bmp_and_webp_headers_are_read_too(sandbox: Sandbox) -> None:
    jpeg = make.save(make.scene(), "JPEG")
    at = jpeg.index(b"\xff\xc0") + 5
    bmp = make.save(make.scene(), "BMP")
    webp = make.save(Image.new("RGBA", (4, 4), (1, 2, 3, 4)), "WEBP", lossless=True, exif=make.exif(1))
    for huge, pixels in (
        (jpeg[:at] + b"\xff\xff\xff\xff" + jpeg[at + 4 :], 65535**2),
        (bmp[:18] + struct.pack("<ii", 30_000, -30_000) + bmp[26:], 30_000**2),
        (webp[:24] + b"\x0f\x27\0\x0f\x27\0" + webp[30:], 10_000**2),
    ):
        error = await refusal(sandbox, huge)
        assert error.reason == "MEDIA_TOO_LARGE"
        assert error.facts == {"pixels": pixels, "limit": LIMIT}


@pytest.mark.parametrize(("width", "height"), [(0, 5), (5, 0), (0, 0)])
async def test_b14_no_pixels_is_damage(sandbox: Sandbox, width: int, height: int) -> None:
    data = make.PNG + make.ihdr(width, height) + make.chunk(b"IDAT", zlib.compress(b"\0")) + make.chunk(b"IEND", b"")
    error = await refusal(sandbox, data)
    assert error.reason == "MEDIA_DECODE_FAILED"
    assert error.facts == {"width": width, "height": height}


@pytest.mark.parametrize("kind", [b"zTXt", b"iCCP"])
async def test_b15_a_chunk_that_inflates_without_end_is_refused(sandbox: Sandbox, kind: bytes) -> None:
    bomb = make.chunk(kind, b"name\0\0" + zlib.compress(bytes(80 * 2**20), 9))
    before = forget_peak()
    error = await refusal(sandbox, make.png(make.scene(), 8, 2, before=bomb))
    assert error.reason == "MEDIA_DECODE_FAILED"
    assert peak_kib() - before < 64 * 1024


async def test_b18_the_same_bomb_is_refused_in_a_list_of_frames(sandbox: Sandbox) -> None:
    bomb = make.bomb_png(13_300, 13_300)
    error = await refusal(sandbox, listed([make.save(make.scene()), bomb], (0.0, 1.0)))
    assert error.reason == "MEDIA_TOO_LARGE"
    assert error.facts == {"pixels": 13_300**2, "limit": LIMIT, "index": 1}
    error = await refusal(sandbox, listed([bomb], None, "image"))
    assert error.reason == "MEDIA_TOO_LARGE"
    error = await refusal(sandbox, listed([RawFrame(b"", 13_300, 13_300, 3)], (0.0,)))
    assert error.reason == "MEDIA_TOO_LARGE"


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
async def test_b19_orientation_is_applied_and_said(sandbox: Sandbox, form: str, orientation: int) -> None:
    options = {} if form == "PNG" else {"quality": 95, "lossless": True}
    if form == "JPEG":
        options.pop("lossless")
    plain = make.save(make.scene(16, 24), form, **options)
    tagged = make.save(make.scene(16, 24), form, exif=make.exif(orientation), **options)
    source = MediaSource("image", data=tagged)
    baked = Image.open(io.BytesIO(plain)).convert("RGB")
    baked.getexif()[0x0112] = orientation
    want = np.array(ImageOps.exif_transpose(baked))
    shape = (24, 16, 3) if orientation >= 5 else (16, 24, 3)
    assert want.shape == shape
    assert np.array_equal(await picture(sandbox, tagged), want)
    applied = ("orientation_applied",) if orientation > 1 else ()
    assert (await sandbox.probe(source)).flags == applied
    assert (await frames(sandbox, source))[1].flags == applied


async def test_b19_orientation_behind_the_pixels_counts_as_well(sandbox: Sandbox) -> None:
    late = make.png(make.scene(4, 6), 8, 2, after=make.chunk(b"eXIf", make.exif(6)[6:]))
    assert (await picture(sandbox, late)).shape == (6, 4, 3)


@pytest.mark.parametrize("orientation", [0, 9, 255, 65535])
async def test_b20_an_orientation_that_does_not_exist_means_upright(sandbox: Sandbox, orientation: int) -> None:
    for form in ("JPEG", "PNG", "WEBP"):
        data = make.save(make.scene(), form, exif=make.exif(orientation))
        assert np.array_equal(await picture(sandbox, data), await picture(sandbox, make.save(make.scene(), form)))


@pytest.mark.parametrize(
    "block", [b"Exif\0\0garbage", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff"]
)
async def test_b20_damaged_metadata_does_not_spoil_a_picture(sandbox: Sandbox, block: bytes) -> None:
    data = make.save(make.scene(), "JPEG", exif=b"Exif\0\0" + block)
    assert np.array_equal(await picture(sandbox, data), await picture(sandbox, make.save(make.scene(), "JPEG")))


async def test_b22_cmyk_becomes_rgb_with_and_without_adobes_marker(sandbox: Sandbox) -> None:
    red = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    data = make.save(red, "JPEG", quality=100)
    assert data.find(b"Adobe") > 0
    assert (await picture(sandbox, data))[8, 8].tolist() == [255, 0, 0]
    at = data.index(b"\xff\xee")
    plain = data[:at] + data[at + 2 + int.from_bytes(data[at + 2 : at + 4], "big") :]
    # Without the marker nothing says whether the values are inverted. As good as all such files are.
    assert (await picture(sandbox, plain))[8, 8].tolist() == [255, 0, 0]
    ycck = data[: at + 15] + b"\2" + data[at + 16 :]
    assert (await picture(sandbox, ycck)).shape == (16, 16, 3)


async def test_b23_a_palette_is_expanded(sandbox: Sandbox) -> None:
    palette = make.chunk(b"PLTE", bytes([10, 20, 30, 200, 100, 50]))
    data = make.png(np.array([[[0], [1]]]), 8, 3, before=palette)
    assert (await picture(sandbox, data)).tolist() == [[[10, 20, 30], [200, 100, 50]]]


async def test_b24_palette_alpha_is_composited_on_white(sandbox: Sandbox) -> None:
    before = make.chunk(b"PLTE", bytes([10, 20, 30, 200, 100, 50])) + make.chunk(b"tRNS", bytes([0, 128]))
    data = make.png(np.array([[[0], [1]]]), 8, 3, before=before)
    assert (await picture(sandbox, data)).tolist() == [[[255, 255, 255], [227, 177, 152]]]


@pytest.mark.parametrize(("depth", "key", "other"), [(1, 1, 0), (2, 2, 1), (4, 9, 3), (8, 77, 78), (16, 4096, 4097)])
async def test_b25_a_grey_colour_key_becomes_white(sandbox: Sandbox, depth: int, key: int, other: int) -> None:
    data = make.png(np.array([[[key], [other]]]), depth, 0, before=make.chunk(b"tRNS", struct.pack(">H", key)))
    grey = other >> 8 if depth == 16 else other * 255 // (2**depth - 1)
    assert (await picture(sandbox, data)).tolist() == [[[255] * 3, [grey] * 3]]


@pytest.mark.parametrize("depth", [8, 16])
async def test_b25_an_rgb_colour_key_becomes_white(sandbox: Sandbox, depth: int) -> None:
    scale = 256 if depth == 16 else 1
    samples = np.array([[[10, 20, 30], [10, 20, 31]]]) * scale
    key = make.chunk(b"tRNS", struct.pack(">HHH", *(samples[0, 0].tolist())))
    assert (await picture(sandbox, make.png(samples, depth, 2, before=key))).tolist() == [[[255] * 3, [10, 20, 31]]]


@pytest.mark.parametrize("form", ["PNG", "WEBP"])
async def test_b26_hidden_colours_stay_hidden(sandbox: Sandbox, form: str) -> None:
    options = {"lossless": True, "exact": True} if form == "WEBP" else {}
    rgba = np.array([[[10, 20, 30, 0], [200, 100, 50, 128], [1, 2, 3, 255]]], np.uint8)
    data = make.save(Image.fromarray(rgba, "RGBA"), form, **options)
    assert (await picture(sandbox, data)).tolist() == [[[255, 255, 255], [227, 177, 152], [1, 2, 3]]]
    hidden = np.concatenate([make.scene(), np.zeros((24, 32, 1), np.uint8)], axis=2)
    assert (await picture(sandbox, make.save(Image.fromarray(hidden, "RGBA"), form, **options))).min() == 255


async def test_b26_grey_alpha_is_composited_too(sandbox: Sandbox) -> None:
    data = make.png(np.array([[[100, 0], [100, 128], [100, 255]]]), 8, 4)
    assert (await picture(sandbox, data)).tolist() == [[[255] * 3, [177] * 3, [100] * 3]]


async def test_b26_files_and_raw_frames_composite_alike(sandbox: Sandbox) -> None:
    colour, alpha = np.meshgrid(np.arange(256), np.arange(256))
    rgba = np.stack([colour, colour, colour, alpha], axis=2).astype(np.uint8)
    (frame,), _ = await opened(sandbox, listed([RawFrame(rgba.tobytes(), 256, 256, 4)], None, "image"))
    assert np.array_equal(frame.rgb, await picture(sandbox, make.save(Image.fromarray(rgba, "RGBA"))))


async def test_b27_16_bit_grey_is_its_high_byte(sandbox: Sandbox) -> None:
    data = make.png(np.array([[[0], [256], [4096], [65535]]]), 16, 0)
    assert (await picture(sandbox, data))[0, :, 0].tolist() == [0, 1, 16, 255]


@pytest.mark.parametrize(("colour", "channels"), [(2, 3), (6, 4), (4, 2)])
async def test_b28_16_bit_colour_and_alpha_are_their_high_bytes(sandbox: Sandbox, colour: int, channels: int) -> None:
    samples = np.full((1, 4, channels), 65535)
    samples[0, :, : 3 if channels > 2 else 1] = np.array([0, 511, 4096, 65535])[:, None]
    assert (await picture(sandbox, make.png(samples, 16, colour)))[0, :, 0].tolist() == [0, 1, 16, 255]


@pytest.mark.parametrize("interlace", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 4, 8])
async def test_b29_shallow_and_interlaced_grey_spans_0_to_255(sandbox: Sandbox, depth: int, interlace: bool) -> None:
    values = (np.arange(9 * 11) % 2**depth).reshape(9, 11, 1)
    rgb = await picture(sandbox, make.png(values, depth, 0, interlace=interlace))
    assert np.array_equal(rgb[:, :, 1], values[:, :, 0] * 255 // (2**depth - 1))


@pytest.mark.parametrize("depth", [1, 2, 4])
async def test_b29_shallow_palettes_are_expanded(sandbox: Sandbox, depth: int) -> None:
    palette = np.random.default_rng(2).integers(0, 256, (2**depth, 3), np.uint8)
    values = (np.arange(5 * 7) % 2**depth).reshape(5, 7, 1)
    data = make.png(values, depth, 3, interlace=True, before=make.chunk(b"PLTE", palette.tobytes()))
    assert np.array_equal(await picture(sandbox, data), palette[values[:, :, 0]])


@pytest.mark.parametrize("profile", [b"broken", bytes(5000), b"\0" * 36 + b"acsp" + b"\0" * 500])
async def test_b31_colour_profiles_are_not_applied(sandbox: Sandbox, profile: bytes) -> None:
    for form in ("PNG", "JPEG", "WEBP"):
        tagged = make.save(make.scene(), form, icc_profile=profile)
        assert np.array_equal(await picture(sandbox, tagged), await picture(sandbox, make.save(make.scene(), form)))


MOVING = [make.scene(12, 16, shift) for shift in (0, 90, 180)]


def moving(form: str, **options: object) -> bytes:
    first, *rest = (Image.fromarray(frame) for frame in MOVING)
    if form == "WEBP":
        options["lossless"] = True
    return make.save(first, form, save_all=True, append_images=rest, duration=[100, 250, 400], **options)


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
async def test_b32_an_animation_as_an_image_is_its_first_frame(sandbox: Sandbox, form: str) -> None:
    data = moving(form)
    probed = await sandbox.probe(MediaSource("image", data=data))
    assert (probed.animated, probed.frames_in_file, probed.frame_offsets) == (True, 3, (0.0,))
    rgb = await picture(sandbox, data)
    assert np.abs(rgb.astype(int) - MOVING[0]).max() <= (0 if form != "GIF" else 40)


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
async def test_b33_an_animation_as_a_video_has_its_own_times(sandbox: Sandbox, form: str) -> None:
    source = MediaSource("video", data=moving(form))
    probed = await sandbox.probe(source)
    assert probed.frame_offsets == pytest.approx((0.0, 0.1, 0.35))
    assert probed.duration == pytest.approx(0.75)
    shown, ending = await frames(sandbox, source, (0, 2))
    assert [(frame.index, frame.offset) for frame in shown] == [(0, 0.0), (2, pytest.approx(0.35))]
    assert (ending.frames, ending.truncated) == (2, False)
    for frame in shown:
        assert np.abs(frame.rgb.astype(int) - MOVING[frame.index]).max() <= (0 if form != "GIF" else 40)


async def test_b33_partial_frames_are_composited_on_what_was_there(sandbox: Sandbox) -> None:
    first = Image.new("RGB", (8, 8), (255, 0, 0))
    second = first.copy()
    second.paste((0, 0, 255), (2, 2, 4, 4))  # Pillow writes only the changed rectangle
    data = make.save(first, "GIF", save_all=True, append_images=[second], duration=100)
    shown, _ = await frames(sandbox, MediaSource("video", data=data), (1,))
    assert shown[0].rgb[0, 0].tolist() == [255, 0, 0]
    assert shown[0].rgb[3, 3].tolist() == [0, 0, 255]


async def test_b33_a_still_in_front_of_an_animation_is_not_its_first_frame(sandbox: Sandbox) -> None:
    data = moving("PNG", default_image=True)
    probed = await sandbox.probe(MediaSource("video", data=data))
    shown, _ = await frames(sandbox, MediaSource("video", data=data), tuple(range(len(probed.frame_offsets))))
    assert [frame.rgb.tolist() for frame in shown] == [MOVING[1].tolist(), MOVING[2].tolist()]
    assert np.array_equal(await picture(sandbox, data), MOVING[0])


async def test_b33_frames_without_a_duration_get_one_and_it_is_said(sandbox: Sandbox) -> None:
    red, blue = (Image.new("RGB", (4, 4), colour) for colour in ("red", "blue"))
    data = make.save(red, "GIF", save_all=True, append_images=[blue], duration=0)
    probed = await sandbox.probe(MediaSource("video", data=data))
    assert probed.frame_offsets == pytest.approx((0.0, 0.1))
    assert probed.flags == ("untimed_frames",)


async def test_b33_a_cut_animation_is_refused_below_the_share(sandbox: Sandbox) -> None:
    data = moving("GIF")
    error = await refusal(sandbox, data[: len(data) * 5 // 6], "video")
    assert error.reason == "MEDIA_DECODE_FAILED"
    assert (error.facts["frames_got"], error.facts["frames_claimed"]) == (2, 3)


async def test_b34_a_multi_picture_jpeg_is_a_still(sandbox: Sandbox) -> None:
    first, second = Image.fromarray(make.scene()), Image.fromarray(make.scene(12, 16))
    data = make.save(first, "MPO", save_all=True, append_images=[second])
    assert Image.open(io.BytesIO(data)).format == "MPO"
    probed = await sandbox.probe(MediaSource("image", data=data))
    assert (probed.found, probed.animated, probed.frames_in_file) == ("JPEG", False, 2)
    assert (await picture(sandbox, data)).shape == (24, 32, 3)


@pytest.mark.parametrize(("height", "width"), [(1, 1), (2, 2), (26, 28), (1, 100), (100, 1), (3, 3)])
async def test_b35_b36_small_and_narrow_pictures_keep_their_layout(sandbox: Sandbox, height: int, width: int) -> None:
    scene = make.scene(height, width)
    assert np.array_equal(await picture(sandbox, make.save(scene)), scene)


async def test_b44_too_many_bytes_are_refused_with_both_numbers() -> None:
    from chiasm.media.types import Limits

    async with Sandbox(limits=Limits(max_bytes=100, max_listed_frames=2)) as small:
        error = await refusal(small, bytes(101))
        assert (error.reason, error.facts) == ("MEDIA_TOO_LARGE", {"bytes": 101, "limit": 100})
        error = await refusal(small, listed([RawFrame(bytes(75), 5, 5, 3)] * 2, (0.0, 1.0)))
        assert (error.reason, error.facts) == ("MEDIA_TOO_LARGE", {"bytes": 150, "limit": 100})
        error = await refusal(small, listed([b"x"] * 3, (0.0, 1.0, 2.0)))
        assert (error.reason, error.facts) == ("TOO_MANY_ITEMS", {"got": 3, "limit": 2})
        assert small.pids == frozenset()


async def test_b47_a_12_bit_jpeg_is_read_or_refused(sandbox: Sandbox) -> None:
    data = make.save(make.scene(), "JPEG")
    at = data.index(b"\xff\xc0") + 4
    deep = data[:at] + b"\x0c" + data[at + 1 :]
    assert (await refusal(sandbox, deep)).reason == "MEDIA_DECODE_FAILED"
