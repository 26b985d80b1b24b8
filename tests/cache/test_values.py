"""Values of a reply, however the socket cuts it: each byte where it belongs, nothing that was not asked for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chiasm.cache.values import Nonsense, TooLong, Values

SIZE = 40
"""Of a chunk in these tests."""


def reply(*found: bytes | None) -> bytes:
    told = (b"$-1\r\n" if value is None else b"$%d\r\n%b\r\n" % (len(value), value) for value in found)
    return b"*%d\r\n" % len(found) + b"".join(told)


def fed(values: Values, data: bytes, cuts: list[int], *, straight: bool) -> bytes:
    """What is behind the reply. With `straight`, whatever is a value goes to its place as from a socket."""
    rest = memoryview(data)
    for cut in [*cuts, len(data)]:
        piece, rest = rest[:cut], rest[cut:]
        while straight and len(values.wanting) and len(piece):
            taken = min(len(values.wanting), len(piece))
            values.wanting[:taken] = piece[:taken]
            values.took(taken)
            piece = piece[taken:]
        behind = values.feed(piece) if len(piece) else None
        if behind is not None:
            return bytes(behind) + bytes(rest)
    raise AssertionError("the reply did not end")


some = st.lists(st.none() | st.binary(min_size=SIZE, max_size=SIZE), max_size=3)


@given(some, st.none() | st.binary(max_size=SIZE), st.lists(st.integers(0, 30)), st.binary(max_size=50), st.booleans())
def test_every_value_is_where_it_belongs_however_the_reply_is_cut(
    full: list[bytes | None], last: bytes | None, cuts: list[int], behind: bytes, straight: bool
) -> None:
    found = [*full, last]
    values = Values([SIZE] * len(found))
    assert fed(values, reply(*found) + behind, cuts, straight=straight) == behind
    assert values.lengths == [-1 if value is None else len(value) for value in found]
    for index, value in enumerate(found):
        assert value is None or values.room[index * SIZE :][: len(value)] == value


def test_a_value_that_is_too_long_is_told_before_any_of_it_is_taken() -> None:
    values = Values([SIZE, 5])
    with pytest.raises(TooLong):
        values.feed(memoryview(reply(bytes(SIZE), b"abcdef")))
    assert values.too_long
    assert values.lengths == [SIZE, 6]


@pytest.mark.parametrize(
    "said",
    [
        b"*3\r\n",
        b"*-1\r\n",
        b"*2\r\n:1\r\n",
        b"*2\r\n$-2\r\n",
        b"*2\r\n$x\r\n",
        b"*2\r\n$" + b"1" * 40,
        b"*2\r\n*2\r\n",
        b"*2\r\n\r\n",
    ],
)
def test_what_is_no_list_of_so_many_values_is_nonsense(said: bytes) -> None:
    with pytest.raises(Nonsense):
        Values([SIZE, SIZE]).feed(memoryview(said))


def test_a_refusal_is_left_to_who_can_read_it() -> None:
    values = Values([SIZE])
    assert bytes(values.feed(memoryview(b"-NOPERM no\r\n")) or b"") == b"-NOPERM no\r\n"
    assert not values.lengths
