"""The digest of a medium: the same however its bytes came, another for whatever makes another medium."""

from __future__ import annotations

from collections.abc import Sequence

from blake3 import blake3
from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st

from chiasm.rpc.medium import DIGEST_BYTES, RollingDigest, medium_digest
from chiasm.rpc.v1 import common_pb2 as pb

VIDEO = pb.MEDIA_KIND_VIDEO


def file(kind: pb.MediaKind.ValueType = VIDEO, **more: object) -> pb.MediaHeader:
    return pb.MediaHeader(kind=kind, **more)  # type: ignore[arg-type]


def listed(*frames: pb.FrameHeader, fps: float | None = None) -> pb.MediaHeader:
    return pb.MediaHeader(kind=VIDEO, frames=pb.FrameList(frames=frames, fps=fps))


def raw(height: int = 1, width: int = 2, channels: int = 3) -> pb.FrameHeader:
    return pb.FrameHeader(raw=pb.RawLayout(size=pb.Size(height=height, width=width), channels=channels))


def at(seconds: int) -> pb.FrameHeader:
    return pb.FrameHeader(frame_offset=Duration(seconds=seconds))


def rolled(header: pb.MediaHeader, pieces: Sequence[bytes], step: int) -> RollingDigest:
    digest = RollingDigest(header)
    for number, piece in enumerate(pieces):
        for start in range(0, len(piece), step):
            digest.update(number, piece[start : start + step])
    return digest


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=5), st.integers(1, 50), st.booleans())
def test_bytes_that_come_in_pieces_have_the_digest_of_all_at_once(
    pieces: list[bytes], step: int, as_list: bool
) -> None:
    if not as_list:
        pieces = pieces[:1]
    header = listed(*(at(i) for i in range(len(pieces)))) if as_list else file()
    digest = rolled(header, pieces, step)
    assert digest.digest() == digest.digest() == medium_digest(header, pieces)
    assert digest.of_bytes() == blake3(b"".join(pieces)).digest()


def test_whatever_makes_another_medium_makes_another_digest() -> None:
    two = [b"ab", b"cd"]
    media = [
        (file(), [b"abcd"]),
        (file(), [b"abce"]),
        (file(), [b""]),
        (file(pb.MEDIA_KIND_IMAGE), [b"abcd"]),
        (listed(at(0)), [b"abcd"]),
        (listed(), [b"abcd"]),
        (listed(at(0), at(1)), two),
        (listed(at(0), at(1)), [b"abc", b"d"]),
        (listed(at(0), at(1)), [b"", b"abcd"]),
        (listed(at(0), at(1)), [b"cd", b"ab"]),
        (listed(at(0), at(2)), two),
        (listed(pb.FrameHeader(), at(1)), two),
        (listed(pb.FrameHeader(), pb.FrameHeader(), fps=1.0), two),
        (listed(pb.FrameHeader(), pb.FrameHeader(), fps=0.0), two),
        (listed(pb.FrameHeader(), pb.FrameHeader()), two),
        (listed(raw()), [b"abcdef"]),
        (listed(raw(2, 1)), [b"abcdef"]),
        (listed(raw(2, 3, 1)), [b"abcdef"]),
        (listed(pb.FrameHeader()), [b"abcdef"]),
    ]
    digests = {medium_digest(header, pieces) for header, pieces in media}
    assert len(digests) == len(media)
    assert {len(digest) for digest in digests} == {DIGEST_BYTES}


def test_what_a_sender_believes_is_no_part_of_it() -> None:
    assert medium_digest(file(mime_type="video/mp4", byte_length=9), [b"x"]) == medium_digest(file(), [b"x"])
