"""Manifests: what was packed is unpacked, and what does not fit together is none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chiasm.cache.manifest import CHUNK_BYTES, MANIFEST_BYTES, Manifest
from tests.cache.arenas import key

MOST = 16 * CHUNK_BYTES
MADE = Manifest(key("a"), bytes(range(16)), 3 * CHUNK_BYTES + 5, b"header", b"tag")

manifests = st.builds(
    Manifest,
    st.just(key("a")),
    st.binary(min_size=16, max_size=16),
    st.integers(0, MOST),
    st.binary(max_size=1024),
    st.binary(max_size=1024),
)


@given(manifests)
def test_a_manifest_comes_back_and_its_pieces_are_the_whole(manifest: Manifest) -> None:
    assert Manifest.unpack(manifest.pack(), key("a"), MOST) == manifest
    assert len(manifest.pack()) <= MANIFEST_BYTES
    assert sum(manifest.length(index) for index in range(manifest.chunks)) == manifest.payload


@given(st.integers(0, len(MADE.pack()) - 1))
def test_a_manifest_that_was_cut_is_none(end: int) -> None:
    assert Manifest.unpack(MADE.pack()[:end], key("a"), MOST) == "manifest"


@given(st.binary(max_size=MANIFEST_BYTES + 10))
def test_any_other_bytes_are_none(packed: bytes) -> None:
    assert isinstance(Manifest.unpack(packed, key("a"), MOST), str)


@pytest.mark.parametrize(
    ("manifest", "why"),
    [
        (replace(MADE, key=key("b")), "key"),
        (replace(MADE, payload=MOST + 1), "size"),
        (replace(MADE, payload=1 << 62), "size"),
    ],
)
def test_what_a_manifest_states_is_held_against_what_can_be(manifest: Manifest, why: str) -> None:
    if manifest.payload < 1 << 60:
        assert Manifest.unpack(manifest.pack(), key("a"), MOST) == why
    else:
        packed = bytearray(MADE.pack())
        packed[-9 - 8 : -9] = manifest.payload.to_bytes(8, "little")
        assert Manifest.unpack(bytes(packed), key("a"), MOST) == why


def test_what_is_too_long_to_be_packed_says_so() -> None:
    assert not replace(MADE, header=bytes(1025)).fits
    assert not replace(MADE, tag=bytes(1025)).fits
    assert MADE.fits
