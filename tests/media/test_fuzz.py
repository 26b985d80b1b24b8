"""B9, B90: whatever is damaged, a medium is decoded or refused. A short slice of `tests/fuzz/media.py`."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chiasm.errors import InvalidRequest
from chiasm.media.open import check
from chiasm.media.sniff import claimed_size, may_move, sniff
from chiasm.media.types import Kind, Limits, MediaSource
from tests.fuzz import media as fuzz


@pytest.mark.timeout(300)
async def test_b09_b90_damaged_files_are_decoded_or_refused() -> None:
    ends = await fuzz.run(range(600), seconds=3600)
    assert sum(ends.values()) == 600
    # Were nothing decoded, or nothing refused, the damage would not be what it should be.
    assert ends["decoded"] > 100
    assert ends["MEDIA_DECODE_FAILED"] > 50


KINDS: tuple[Kind, ...] = ("image", "video")
HEADS = [b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"RIFF\0\0\0\0WEBPVP8X", b"BM", b"\0\0\0\0ftyp"]


@given(
    st.sampled_from(
        [b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"RIFF\0\0\0\0WEBPVP8X", b"BM", b"\0\0\0\0ftyp"]
    ),
    st.binary(max_size=64),
)
def test_naming_a_format_never_fails(head: bytes, tail: bytes) -> None:
    data = head + tail
    found = sniff(data)
    may_move(found.name, data)
    size = claimed_size(found.name, data)
    assert size is None or min(size) >= 0
    for kind in KINDS:
        with contextlib.suppress(InvalidRequest):
            check(MediaSource(kind, data=data), Limits())
