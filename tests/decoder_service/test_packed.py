"""Packed pieces: they are laid as they were before, and equal when they are laid equally."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from decoder_service.packed import PackedPieces

ids = st.lists(st.integers(0, 2**31 - 1), max_size=4)
pieces = st.lists(st.one_of(ids, st.integers(0, 200)), max_size=8)


def laid(pieces: Iterable[Sequence[int] | int]) -> list[tuple[str, int]]:
    """Row by row: a unit, or a token."""
    return [
        row
        for piece in pieces
        for row in ([("unit", piece)] if isinstance(piece, int) else [("token", token) for token in piece])
    ]


@given(pieces, pieces)
def test_what_is_packed_is_laid_as_before_and_equal_where_that_is(
    some: list[list[int] | int], others: list[list[int] | int]
) -> None:
    packed = PackedPieces(some)
    assert laid(packed) == laid(some) == laid(packed), "as often as it is asked for"
    assert (packed == PackedPieces(others)) == (laid(some) == laid(others))
    assert packed == PackedPieces(packed)
