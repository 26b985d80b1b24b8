"""What a controller says is taken whole, or not at all."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.membership import Hopeless
from router.ray_words import Told

WORDS = st.lists(st.text(max_size=20), max_size=4)
WHOLE = {"targets": {"encoder": ["a:1"], "decoder": []}, "asleep": ["m"], "hopeless": [["what", "where", "fix"]]}


@given(WORDS, WORDS, st.frozensets(st.text(max_size=20), max_size=4), st.lists(st.tuples(*[st.text()] * 3), max_size=3))
def test_what_is_told_is_read(
    encoders: list[str], decoders: list[str], asleep: frozenset[str], hopeless: list[tuple[str, str, str]]
) -> None:
    told = Told({"encoder": encoders, "decoder": decoders}, asleep, tuple(Hopeless(*why) for why in hopeless))
    line = told.line().encode()
    assert b"\n" not in line and Told.read(line + b"\n") == told


def test_one_that_knows_nothing_yet_says_so() -> None:
    assert Told.read(Told().line().encode()) == Told()


@pytest.mark.parametrize(
    "other",
    [
        {"targets": {"encoder": ["a:1"]}},
        {"targets": {"encoder": "a:1", "decoder": []}},
        {"targets": {"encoder": [1], "decoder": []}},
        {"targets": None},
        {"asleep": "m"},
        {"asleep": [None]},
        {"hopeless": [["what", "where"]]},
        {"hopeless": [1]},
        {"hopeless": {}},
    ],
)
def test_what_is_almost_right_is_not_taken(other: dict[str, object]) -> None:
    assert Told.read(json.dumps(WHOLE).encode()) is not None
    assert Told.read(json.dumps({**WHOLE, **other}).encode()) is None


@given(st.binary(max_size=200))
def test_garbage_is_not_taken(line: bytes) -> None:
    assert Told.read(line) in (None, Told())


def test_a_line_that_was_cut_or_nests_without_end_is_not_taken() -> None:
    line = json.dumps(WHOLE).encode()
    assert all(Told.read(line[:end]) is None for end in range(len(line)))
    assert Told.read(b"[" * 100_000) is None
