"""Where an answer ends at a stop string, and what of it may be told before."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from decoder_service.detokenizer import Detokenizer
from decoder_service.stops import StopStrings

TEXTS = st.text("ab\u00e9\U0001f600", max_size=40)
STOPS = st.lists(st.text("ab\u00e9\U0001f600", min_size=1, max_size=5), max_size=4)


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The answer up to the stop string that is whole first, the longest of those that end together; and which."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(TEXTS, STOPS, st.data())
def test_however_its_bytes_come_the_answer_is_cut_at_the_first_stop_string(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    whole = text.encode()
    places = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=12)))
    pieces = [whole[first:last] for first, last in pairwise([0, *places, len(whole)])]
    detokenizer, strings = Detokenizer(), StopStrings(stops)
    told = ""
    for piece in pieces:
        told += strings.push(detokenizer.push(piece))
        assert cut(text, stops)[0].startswith(told), "what is told is never taken back"
        if strings.found is not None:
            break
    told += strings.finish(detokenizer.finish())
    assert (told, strings.found) == cut(text, stops)


@given(st.binary(max_size=30), st.lists(st.text(min_size=1, max_size=2), max_size=2), st.data())
def test_bytes_that_are_no_text_are_cut_as_the_text_that_they_come_to(
    whole: bytes, stops: list[str], data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(whole)))
    detokenizer, strings = Detokenizer(), StopStrings([*stops, "\ufffda", "\ufffd\ufffd"])
    told = "".join(strings.push(detokenizer.push(piece)) for piece in (whole[:at], whole[at:]))
    told += strings.finish(detokenizer.finish())
    assert (told, strings.found) == cut(whole.decode(errors="replace"), [*stops, "\ufffda", "\ufffd\ufffd"])


def test_text_is_held_back_only_while_it_may_become_a_stop_string() -> None:
    strings = StopStrings(["END", "Eel"])
    assert [strings.push(text) for text in ("a", "E", "N", "d", "E", "Ee", "ls")] == ["a", "", "", "ENd", "", "E", ""]
    assert strings.found == "Eel"
    assert strings.finish("more") == ""


def test_what_was_held_back_comes_at_the_end() -> None:
    strings = StopStrings(["END"])
    assert (strings.push("an EN"), strings.finish(), strings.found) == ("an ", "EN", None)
    strings = StopStrings(["END"])
    assert (strings.push("an EN"), strings.finish("D."), strings.found) == ("an ", "", "END")


@given(TEXTS, TEXTS, STOPS)
def test_a_stop_string_that_ends_too_early_is_part_of_the_answer(early: str, late: str, stops: list[str]) -> None:
    strings = StopStrings(stops)
    told = strings.push(early, may_end=False) + strings.push(late) + strings.finish()
    whole = early + late
    for end in range(len(early) + 1, len(whole) + 1):
        if ending := [stop for stop in stops if whole[:end].endswith(stop)]:
            # What was told of the early text is not taken back.
            assert told == whole[: end - len(max(ending, key=len))]
            return
    assert (told, strings.found) == (whole, None)


def test_without_stop_strings_everything_is_told_at_once() -> None:
    strings = StopStrings([])
    assert (strings.push("a"), strings.push(""), strings.finish("b")) == ("a", "", "b")
