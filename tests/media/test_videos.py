"""Bad and odd videos, one test per row of the list of bad inputs (B57 to B86)."""

from __future__ import annotations

import io
import itertools
import struct
from collections.abc import Sequence
from fractions import Fraction

import av
import numpy as np
import pytest
from av.video.reformatter import ColorRange, Colorspace
from av.video.stream import VideoStream

from chiasm.media.sandbox import Sandbox
from chiasm.media.types import Decoded, Frame, Limits, MediaSource, Probed
from tests.media import make
from tests.media.ask import ITEM, frames, refusal

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def everything(sandbox: Sandbox, data: bytes) -> tuple[Probed, list[Frame], Decoded]:
    source = MediaSource("video", data=data)
    probed = await sandbox.probe(source, item=ITEM)
    shown, ending = await frames(sandbox, source, range(len(probed.frame_offsets)))
    for frame in shown:
        assert frame.rgb.shape == (probed.height, probed.width, 3)
        assert frame.offset == probed.frame_offsets[frame.index]
    return probed, shown, ending


def greys(shown: Sequence[Frame]) -> list[int]:
    return [int(frame.rgb.mean().round()) for frame in shown]


async def test_b57_empty_and_renamed_files(sandbox: Sandbox) -> None:
    assert (await refusal(sandbox, b"", "video")).reason == "MEDIA_EMPTY"
    error = await refusal(sandbox, b"this is no video\n" * 20, "video")
    assert (error.reason, error.facts) == ("MEDIA_UNSUPPORTED", {"found": "unknown"})


async def test_b58_a_container_without_frames(sandbox: Sandbox) -> None:
    mp4 = make.index_first(make.video(make.steps(3)))
    for count in (b"stsz", b"stts", b"stsc", b"stco", b"ctts", b"stss"):
        at = mp4.find(count)
        if at > 0:
            at += 12 if count == b"stsz" else 8
            mp4 = mp4[:at] + bytes(4) + mp4[at + 4 :]
    error = await refusal(sandbox, mp4, "video")
    assert (error.reason, error.facts) == ("NO_FRAMES", {"found": "mov,mp4"})


async def test_b59_b66_a_claimed_count_is_not_believed(sandbox: Sandbox) -> None:
    asf = make.video(make.steps(5), "asf", "msmpeg4v2")
    with av.open(io.BytesIO(asf)) as container:
        assert container.streams.video[0].frames == 0
    _, shown, ending = await everything(sandbox, asf)
    assert (len(shown), ending.truncated) == (5, False)
    avi = make.video(make.steps(5), "avi")
    at = avi.index(b"avih") + 8 + 16
    for claimed in (0, 3, 10**9):
        lying = avi[:at] + struct.pack("<I", claimed) + avi[at + 4 :]
        assert len((await everything(sandbox, lying))[1]) == 5


@pytest.mark.parametrize("count", [1, 2, 3, 9])
async def test_b60_b71_any_number_of_frames(sandbox: Sandbox, count: int) -> None:
    probed, shown, ending = await everything(sandbox, make.video(make.steps(count), codec="libx264"))
    assert probed.frame_offsets == pytest.approx([number / 10 for number in range(count)])
    assert probed.duration == pytest.approx(count / 10)
    assert [abs(grey - make.level(number)) <= 2 for number, grey in enumerate(greys(shown))] == [True] * count
    assert ending == Decoded(count, False)


@pytest.mark.parametrize(
    ("container", "codec"), [("mp4", "aac"), ("matroska", "aac"), ("wav", "pcm_s16le"), ("mp3", "mp3")]
)
async def test_b61_sound_alone_is_no_video(sandbox: Sandbox, container: str, codec: str) -> None:
    assert (await refusal(sandbox, make.audio(container, codec), "video")).reason == "NO_VIDEO_STREAM"


async def test_b62_cover_art_is_no_video(sandbox: Sandbox) -> None:
    cover = make.save(make.scene(), "JPEG")
    item = make.box(b"covr", make.box(b"data", struct.pack(">II", 13, 0) + cover))
    handler = make.box(b"hdlr", bytes(8) + b"mdirappl" + bytes(9))
    meta = make.box(b"udta", make.box(b"meta", bytes(4) + handler + make.box(b"ilst", item)))
    sound = make.audio()
    at = sound.index(b"moov") - 4
    size = int.from_bytes(sound[at : at + 4], "big")
    with_cover = (
        sound[:at] + struct.pack(">I", size + len(meta)) + sound[at + 4 : at + size] + meta + sound[at + size :]
    )
    with av.open(io.BytesIO(with_cover)) as container:
        assert len(container.streams.video) == 1
    assert (await refusal(sandbox, with_cover, "video")).reason == "NO_VIDEO_STREAM"


async def test_b63_sound_beside_the_video_is_never_decoded(sandbox: Sandbox) -> None:
    data = make.video(make.steps(4), audio=True)
    broken = data.replace(b"mp4a", b"mp4z")
    assert data != broken
    for file in (data, broken):
        assert len((await everything(sandbox, file))[1]) == 4


async def test_b64_cut_before_its_index(sandbox: Sandbox) -> None:
    data = make.video(make.steps(20))
    error = await refusal(sandbox, data[: data.index(b"moov") - 4], "video")
    assert error.reason == "MEDIA_DECODE_FAILED"
    assert error.facts == {"codec": "unknown", "frames_got": 0}


def noisy(count: int) -> list[make.Rgb]:
    return list(np.random.default_rng(3).integers(0, 256, (count, 48, 64, 3), np.uint8))


async def test_b65_cut_in_half_is_refused_with_both_counts(sandbox: Sandbox) -> None:
    data = make.index_first(make.video(noisy(40), options={"g": "1"}))
    error = await refusal(sandbox, data[: len(data) // 2], "video")
    assert error.reason == "MEDIA_DECODE_FAILED"
    assert error.facts["codec"] == "mpeg4"
    assert error.facts["frames_claimed"] == 40
    assert 5 <= int(error.facts["frames_got"]) <= 21


async def test_b65_a_little_missing_is_served_and_said(sandbox: Sandbox) -> None:
    data = make.index_first(make.video(noisy(40), options={"g": "1"}))
    probed, shown, ending = await everything(sandbox, data[: len(data) * 97 // 100])
    assert 37 <= len(shown) < 40
    assert "truncated" in probed.flags
    assert len(probed.frame_offsets) == len(shown)
    assert ending.truncated


async def test_b65_broken_frames_in_the_middle(sandbox: Sandbox) -> None:
    data = make.video(make.steps(40), codec="mjpeg", container="mov", pix_fmt="yuvj420p")
    assert len(make.jpegs(data)) == 40
    _, shown, ending = await everything(sandbox, make.without(data, [7, 20]))
    assert [frame.index for frame in shown] == [number for number in range(40) if number not in (7, 20)]
    assert all(abs(grey - make.level(frame.index)) <= 3 for grey, frame in zip(greys(shown), shown, strict=True))
    assert ending == Decoded(38, True)
    error = await refusal(sandbox, make.without(data, range(5, 11)), "video")
    assert error.reason == "MEDIA_DECODE_FAILED"
    assert error.facts == {"codec": "mjpeg", "frames_got": 34, "frames_claimed": 40}


async def test_b65_only_planned_frames_are_counted(sandbox: Sandbox) -> None:
    data = make.video(make.steps(10), codec="mjpeg", container="mov", pix_fmt="yuvj420p")
    source = MediaSource("video", data=make.without(data, [5]))
    assert (await frames(sandbox, source, (0, 4, 9)))[1] == Decoded(3, False)


async def test_b67_times_come_from_stamps(sandbox: Sandbox) -> None:
    stamps = [0, 40, 45, 300, 1000]
    data = make.video(make.steps(5), "matroska", "libx264", stamps=stamps, time_base=Fraction(1, 1000))
    probed, shown, _ = await everything(sandbox, data)
    assert probed.frame_offsets == pytest.approx([stamp / 1000 for stamp in stamps])
    assert [abs(grey - make.level(number)) <= 2 for number, grey in enumerate(greys(shown))] == [True] * 5


@pytest.mark.parametrize("delta", [0, 1, 0xFFFFFFFF])
async def test_b68_an_absurd_frame_rate_divides_nothing(sandbox: Sandbox, delta: int) -> None:
    mkv = make.video(make.steps(3), "matroska")
    at = mkv.find(bytes.fromhex("23e383"))  # DefaultDuration, ns
    assert at > 0
    size = mkv[at + 3] & 0x7F
    data = mkv[: at + 4] + delta.to_bytes(size, "big") + mkv[at + 4 + size :]
    probed, shown, _ = await everything(sandbox, data)
    assert probed.frame_offsets == pytest.approx((0.0, 0.1, 0.2))
    assert len(shown) == 3


async def test_b69_frame_counts_and_sizes_are_bounded_with_both_numbers() -> None:
    async with Sandbox(limits=Limits(max_video_frames=5, max_pixels=4000, max_video_seconds=2.0)) as small:
        error = await refusal(small, make.video(make.steps(6)), "video")
        assert (error.reason, error.facts) == ("MEDIA_TOO_LARGE", {"frames": 6, "limit": 5})
        error = await refusal(small, make.video(make.steps(2, 64, 64)), "video")
        assert (error.reason, error.facts) == ("MEDIA_TOO_LARGE", {"pixels": 4096, "limit": 4000})
        data = make.video(make.steps(3), stamps=[0, 10, 50])
        error = await refusal(small, data, "video")
        assert error.reason == "MEDIA_TOO_LARGE"
        assert error.facts["limit"] == 2.0
        assert float(error.facts["seconds"]) > 5.0


async def test_b69_claims_of_a_forged_header_are_not_allocated(sandbox: Sandbox) -> None:
    data = make.index_first(make.video(make.steps(3)))
    at = data.index(b"mp4v") + 4 + 24
    huge = data[:at] + b"\xff\xff\xff\xff" + data[at + 4 :]
    # The decoder's own header says 64 x 48, and that is what counts.
    probed = await sandbox.probe(MediaSource("video", data=huge))
    assert (probed.height, probed.width) == (48, 64)
    at = data.index(b"stsz") + 8
    many = data[:at] + struct.pack(">II", 1, 10**9) + data[at + 8 :]
    error = await refusal(sandbox, many, "video")
    assert error.reason in ("MEDIA_TOO_LARGE", "MEDIA_DECODE_FAILED", "NO_FRAMES")


async def test_b70_a_small_claimed_duration_hides_nothing() -> None:
    data = make.video(make.steps(30))
    at = data.index(b"mvhd") + 4 + 16
    short = data[:at] + struct.pack(">I", 1) + data[at + 4 :]
    async with Sandbox(limits=Limits(max_video_seconds=1.5)) as small:
        error = await refusal(small, short, "video")
        assert (error.reason, error.facts["limit"]) == ("MEDIA_TOO_LARGE", 1.5)
        assert float(error.facts["seconds"]) == pytest.approx(3.0)


TURNS = {90: (0, -1, 1, 0), 180: (-1, 0, 0, -1), 270: (0, 1, -1, 0)}


@pytest.mark.parametrize("angle", TURNS)
async def test_b73_quarter_turns_are_applied(sandbox: Sandbox, angle: int) -> None:
    upright = make.video([make.scene(48, 64)] * 2, codec="libx264")
    _, (plain, _), _ = await everything(sandbox, upright)
    probed, shown, _ = await everything(sandbox, make.with_matrix(upright, *TURNS[angle]))
    assert np.array_equal(shown[0].rgb, np.rot90(plain.rgb, angle // 90))
    assert probed.flags == ("rotation_applied",)
    assert (probed.height, probed.width) == ((48, 64) if angle == 180 else (64, 48))


@pytest.mark.parametrize(
    ("matrix", "angle", "mirrored"),
    [((-1, 0, 0, 1), 180.0, True), ((1, 0, 0, -1), 0.0, True), ((0.7071, 0.7071, -0.7071, 0.7071), 315.0, False)],
)
async def test_b74_other_turns_and_mirrors_are_refused(
    sandbox: Sandbox, matrix: tuple[float, float, float, float], angle: float, mirrored: bool
) -> None:
    error = await refusal(sandbox, make.with_matrix(make.video(make.steps(2)), *matrix), "video")
    assert error.reason == "MEDIA_UNSUPPORTED"
    assert error.facts["rotation"] == pytest.approx(angle, abs=0.1)
    assert error.facts["mirrored"] is mirrored


async def test_b75_non_square_pixels_are_reported(sandbox: Sandbox) -> None:
    def wide(stream: VideoStream) -> None:
        stream.codec_context.sample_aspect_ratio = Fraction(4, 3)

    probed, _, _ = await everything(sandbox, make.video(make.steps(2), codec="libx264", adjust=wide))
    assert (probed.height, probed.width, probed.flags) == (48, 64, ("sample_aspect_ratio=4:3",))


async def test_b76_interlaced_video_gives_full_frames(sandbox: Sandbox) -> None:
    data = make.video(
        [make.scene(64, 64)] * 4, codec="libx264", options={"flags": "+ildct+ilme", "x264-params": "tff=1"}
    )
    _, shown, _ = await everything(sandbox, data)
    assert len(shown) == 4
    assert all(np.abs(frame.rgb.astype(int) - make.scene(64, 64)).mean() < 12 for frame in shown)


MATRICES = {"BT.601": (0.299, 0.114), "BT.709": (0.2126, 0.0722)}
CODECS = [
    ("libx264", "yuv420p"),
    ("libx265", "yuv420p"),
    ("libx265", "yuv420p10le"),
    ("libvpx-vp9", "yuv420p"),
    ("libsvtav1", "yuv420p10le"),
]


@pytest.mark.parametrize(("codec", "pix_fmt"), CODECS)
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("matrix", MATRICES)
async def test_b77_codecs_depths_matrices_and_ranges(
    sandbox: Sandbox, codec: str, pix_fmt: str, matrix: str, full: bool
) -> None:
    """Known Y'CbCr goes in; what comes out is what ITU-R BT.601 / BT.709 say it is, whatever carried it."""
    deep = pix_fmt.endswith("10le")
    luma, blue, red = 120, 90, 170
    space, range_ = (1 if matrix == "BT.709" else 6), (2 if full else 1)
    data = _yuv(codec, pix_fmt, (luma, blue, red), space, range_)
    source = MediaSource("video", data=data)
    (frame,), _ = await frames(sandbox, source, (1,))
    kr, kb = MATRICES[matrix]
    y = luma / 255 if full else (luma - 16) / 219
    pb, pr = ((value - 128) / (255 if full else 224) for value in (blue, red))
    r, b = y + 2 * (1 - kr) * pr, y + 2 * (1 - kb) * pb
    g = (y - kr * r - kb * b) / (1 - kr - kb)
    want = np.clip(np.array([r, g, b]) * 255, 0, 255)
    got = frame.rgb.reshape(-1, 3).astype(float).mean(axis=0)
    assert np.abs(got - want).max() < (3.0 if deep else 3.5), (got, want)


def _yuv(codec: str, pix_fmt: str, colour: tuple[int, int, int], space: int, range_: int) -> bytes:
    scale = 4 if pix_fmt.endswith("10le") else 1
    dtype = np.uint16 if scale == 4 else np.uint8
    buffer = io.BytesIO()
    options = {"libsvtav1": {"preset": "12", "crf": "10"}, "libvpx-vp9": {"deadline": "realtime", "cpu-used": "8"}}
    with av.open(buffer, "w", format="matroska") as output:
        stream = output.add_stream(codec, rate=10, options=options.get(codec, {}))
        assert isinstance(stream, VideoStream)
        stream.width = stream.height = 64
        stream.pix_fmt = pix_fmt
        stream.codec_context.colorspace = space
        stream.codec_context.color_range = range_
        if codec == "libx265":
            stream.codec_context.options = {
                "x265-params": "log-level=none:pools=none:frame-threads=1",
                "preset": "ultrafast",
            }
        planes = [np.full((64, 64), colour[0] * scale, dtype)]
        planes += [np.full((32, 32), value * scale, dtype) for value in colour[1:]]
        packed = np.concatenate([plane.reshape(-1, 64) for plane in planes])
        for number in range(3):
            frame = av.VideoFrame.from_ndarray(packed, format=pix_fmt)
            frame.pts = number
            frame.time_base = Fraction(1, 10)
            frame.colorspace = Colorspace(space) if space in [c.value for c in Colorspace] else space
            frame.color_range = ColorRange(range_)
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return buffer.getvalue()


@pytest.mark.parametrize("tag", [b"zzzz", b"encv"])
async def test_b78_unknown_and_encrypted_codecs(sandbox: Sandbox, tag: bytes) -> None:
    data = make.video(make.steps(2), codec="libx264").replace(b"avc1", tag)
    error = await refusal(sandbox, data, "video")
    assert error.reason == "MEDIA_UNSUPPORTED"
    assert error.facts in ({"codec": "unknown"}, {"codec": "encrypted"})


async def test_b78_a_codec_that_is_switched_off(sandbox: Sandbox) -> None:
    error = await refusal(sandbox, make.video(make.steps(2), "avi", "huffyuv", pix_fmt="yuv422p"), "video")
    assert (error.reason, error.facts) == ("MEDIA_UNSUPPORTED", {"codec": "huffyuv"})


async def test_b79_a_change_of_size_is_scaled_to_the_first_and_said(sandbox: Sandbox) -> None:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as output:
        stream = output.add_stream("mjpeg", rate=25)
        assert isinstance(stream, VideoStream)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuvj420p"
        for number in range(6):
            side = 1 + (number >= 3)
            packet = av.Packet(make.save(make.flat(48 * side, 64 * side, (90, 90, 90)), "JPEG"))
            packet.stream, packet.pts, packet.dts = stream, number, number
            packet.time_base = Fraction(1, 25)
            output.mux(packet)
    probed, shown, ending = await everything(sandbox, buffer.getvalue())
    assert (probed.height, probed.width) == (48, 64)
    assert len(shown) == 6
    assert ending.flags == ("size_changed",)
    assert all(abs(grey - 90) <= 2 for grey in greys(shown))


async def test_b81_the_default_stream_is_taken_and_their_number_said(sandbox: Sandbox) -> None:
    probed, shown, _ = await everything(sandbox, make.video(make.steps(4), twice=True))
    assert probed.flags == ("video_streams=2",)
    assert all(abs(grey - make.level(number)) <= 3 for number, grey in enumerate(greys(shown)))


PLAYLISTS = {
    "HLS": b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n",
    "concat": b"ffconcat version 1.0\nfile /etc/passwd\n",
    "SDP": b"v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\nm=video 5004 RTP/AVP 96\r\n",
    "unknown": b"<?xml version='1.0'?><MPD></MPD>",
}


@pytest.mark.parametrize("form", PLAYLISTS)
async def test_b82_playlists_are_not_opened(sandbox: Sandbox, form: str) -> None:
    error = await refusal(sandbox, PLAYLISTS[form], "video")
    assert (error.reason, error.facts) == ("MEDIA_UNSUPPORTED", {"found": form})


async def test_b83_times_start_at_the_first_shown_frame(sandbox: Sandbox) -> None:
    for container, stamps in (("matroska", [500, 600, 700]), ("mpegts", [9000, 12600, 16200])):
        base = Fraction(1, 1000) if container == "matroska" else Fraction(1, 90000)
        codec = "libx264" if container == "matroska" else "mpeg2video"
        if container == "mpegts":
            data = make.video(make.steps(3), container, codec, stamps=[25, 26, 27], time_base=Fraction(1, 25))
            want = [0.0, 0.04, 0.08]
        else:
            data = make.video(make.steps(3), container, codec, stamps=stamps, time_base=base)
            want = [0.0, 0.1, 0.2]
        probed, shown, _ = await everything(sandbox, data)
        assert probed.frame_offsets == pytest.approx(want)
        assert len(shown) == 3


async def test_b83_frames_outside_the_edit_list_are_not_shown(sandbox: Sandbox) -> None:
    data = make.video(make.steps(10), codec="libx264", options={"g": "10", "bf": "0"})
    at = data.index(b"elst") + 4
    assert struct.unpack(">I", data[at + 4 : at + 8]) == (1,)
    scale_at = data.index(b"mdhd") + 4 + 12
    (scale,) = struct.unpack(">I", data[scale_at : scale_at + 4])
    trimmed = data[: at + 12] + struct.pack(">i", scale * 4 // 10) + data[at + 16 :]
    probed, shown, _ = await everything(sandbox, trimmed)
    assert len(shown) == 6
    assert probed.frame_offsets == pytest.approx([number / 10 for number in range(6)])
    assert all(abs(grey - make.level(number + 4)) <= 3 for number, grey in enumerate(greys(shown)))


async def test_b84_reordered_frames_come_in_presentation_order(sandbox: Sandbox) -> None:
    data = make.video(make.steps(12), codec="libx264", options={"bf": "3", "b-adapt": "0", "g": "12"})
    probed, shown, _ = await everything(sandbox, data)
    assert all(a < b for a, b in itertools.pairwise(probed.frame_offsets))
    assert [frame.index for frame in shown] == list(range(12))
    assert all(abs(grey - make.level(number)) <= 3 for number, grey in enumerate(greys(shown)))


async def test_b84_repeated_stamps_are_dropped_and_counted(sandbox: Sandbox) -> None:
    mkv = make.video(make.steps(5), "matroska", "mjpeg", pix_fmt="yuvj420p", stamps=[0, 1, 2, 3, 4])
    at = make.jpegs(mkv)[3] - 3  # the block's time, 16 bits, before its flags
    assert int.from_bytes(mkv[at : at + 2], "big") == 300
    doubled = mkv[:at] + (200).to_bytes(2, "big") + mkv[at + 2 :]
    probed, shown, _ = await everything(sandbox, doubled)
    assert probed.frame_offsets == pytest.approx((0.0, 0.1, 0.2, 0.4))
    assert probed.flags == ("dropped_frames=1",)
    assert len(shown) == 4


async def test_frames_without_stamps_are_counted_by_decoding(sandbox: Sandbox) -> None:
    data = make.video(make.steps(12), "avi", "libx264", options={"bf": "2", "b-adapt": "0"})
    probed, shown, _ = await everything(sandbox, data)
    assert len(shown) == 12
    assert all(a < b for a, b in itertools.pairwise(probed.frame_offsets))
    assert all(abs(grey - make.level(number)) <= 3 for number, grey in enumerate(greys(shown)))


@pytest.mark.parametrize(
    ("container", "codec", "found"),
    [
        ("mp4", "mpeg4", "mov,mp4"),
        ("webm", "libvpx", "matroska,webm"),
        ("avi", "mpeg4", "avi"),
        ("asf", "wmv2", "asf"),
        ("mpegts", "libx264", "mpegts"),
        ("flv", "flv", "flv"),
        ("vob", "mpeg2video", "mpeg"),
    ],
)
async def test_every_container_on_the_list_opens(sandbox: Sandbox, container: str, codec: str, found: str) -> None:
    options = {"auto-alt-ref": "1", "lag-in-frames": "16"} if codec == "libvpx" else {}
    data = make.video(make.steps(20), container, codec, time_base=Fraction(1, 25), options=options)
    probed, shown, ending = await everything(sandbox, data)
    assert (probed.found, len(shown), ending.truncated) == (found, 20, False)
    assert all(abs(grey - make.level(number)) <= 4 for number, grey in enumerate(greys(shown)))


async def test_decoding_stops_at_the_last_planned_frame(sandbox: Sandbox) -> None:
    """What lies behind the last planned frame may be broken."""
    data = make.video(make.steps(10), codec="mjpeg", container="mov", pix_fmt="yuvj420p")
    source = MediaSource("video", data=make.without(data, [6]))
    assert (await frames(sandbox, source, (1, 5)))[1] == Decoded(2, False)
