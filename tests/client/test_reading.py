"""Events read back from the responses of a server."""

from __future__ import annotations

import pytest

from chiasm.client import (
    Finished,
    FramesVisible,
    MediaUsage,
    StageTimes,
    Started,
    TimelineFrame,
    Token,
    TokenLogprobs,
    Usage,
)
from chiasm.client.reading import Reader
from chiasm.errors import ServerError
from chiasm.rpc.times import to_duration
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import router_pb2 as rpb
from tests.client import fake


def test_a_whole_answer_is_read() -> None:
    reader = Reader()
    events = [event for response in fake.answer("ab") for event in reader.read(response)]
    frames = tuple(TimelineFrame(0, i, i, float(i), (1, 4, 4), 5, 7 * i) for i in range(3))
    medium = MediaUsage(
        "video", "mov,mp4", 3, 3, 3, (3, 4, 4), 15, (60, 80), (64, 96), (0.0, 1.0, 2.0), ("thinned",), 3, 2
    )
    assert events == [
        Started(frames, 30),
        FramesVisible(3, 2.0, 0),
        Token("a", (100,), 0, 3),
        Token("b", (101,), 1, 3),
        Finished("stop", Usage(30, 15, len(fake.TEXT), None, (medium,)), StageTimes(encode=0.25)),
    ]


def test_visible_counts_frames_where_a_unit_holds_two() -> None:
    reader = Reader()
    pairs = [pb.TimelineFrame(slot=s, index=i, unit=i // 2) for s in (0, 1) for i in range(4)]
    reader.read(rpb.GenerateResponse(started=pb.Started(attempt=1, frames=pairs)))
    (seen,) = reader.read(rpb.GenerateResponse(visible=pb.Visible(attempt=1, count=3)))
    assert seen == FramesVisible(6, None, 0)
    (seen,) = reader.read(rpb.GenerateResponse(visible=pb.Visible(attempt=1, first=1, count=4, index=5)))
    assert seen == FramesVisible(6, None, 5, first=2)


def test_an_image_has_no_offset() -> None:
    (event,) = Reader().read(rpb.GenerateResponse(started=pb.Started(attempt=1, frames=[pb.TimelineFrame()])))
    assert isinstance(event, Started)
    assert event.frames[0].offset is None


def test_text_that_was_held_back_comes_as_a_last_token() -> None:
    reader = Reader()
    reader.read(fake.started())
    token, end = reader.read(fake.finished(reason=pb.FINISH_REASON_LENGTH, text="tail"))
    assert token == Token("tail", (), 0, 0)
    assert isinstance(end, Finished)
    assert end.reason == "length"


def test_a_stop_string_and_log_probabilities_are_read() -> None:
    place = pb.TokenLogprobs(
        drawn=pb.TokenLogprob(token_id=7, logprob=-0.5),
        top=[pb.TokenLogprob(token_id=7, logprob=-0.5), pb.TokenLogprob(token_id=9, logprob=-1.25)],
    )
    response = fake.tokens(0, "a")
    response.tokens.logprobs.append(place)
    (token,) = Reader().read(response)
    assert isinstance(token, Token)
    assert token.logprobs == (TokenLogprobs(7, -0.5, ((7, -0.5), (9, -1.25))),)
    (end,) = Reader().read(rpb.GenerateResponse(finished=pb.Finished(stop="END")))
    assert isinstance(end, Finished)
    assert end.stop == "END"
    (end,) = Reader().read(rpb.GenerateResponse(finished=pb.Finished()))
    assert isinstance(end, Finished)
    assert end.stop is None


def test_another_attempt_goes_on_and_old_attempts_are_void() -> None:
    reader = Reader()
    responses = [
        fake.started(),
        fake.tokens(0, "a"),
        fake.started(attempt=2),
        fake.tokens(1, "x", attempt=1),
        fake.tokens(1, "b", attempt=2),
    ]
    events = [event for response in responses for event in reader.read(response)]
    assert [event.text for event in events if isinstance(event, Token)] == ["a", "b"]
    assert sum(isinstance(event, Started) for event in events) == 1


@pytest.mark.parametrize("index", [0, 2])
def test_a_gap_or_a_repeated_token_is_an_error(index: int) -> None:
    reader = Reader()
    reader.read(fake.tokens(0, "a"))
    with pytest.raises(ServerError) as caught:
        reader.read(fake.tokens(index, "c"))
    assert caught.value.facts == {"due": 1, "came": index}


def test_events_of_a_newer_server_are_passed_over() -> None:
    assert Reader().read(rpb.GenerateResponse(resume_point=rpb.ResumePoint(attempt=1))) == []
    (end,) = Reader().read(rpb.GenerateResponse(finished=pb.Finished(reason=99)))  # type: ignore[arg-type]
    assert isinstance(end, Finished)
    assert end.reason == "other"


def test_every_stage_time_of_the_wire_is_known() -> None:
    wire = pb.StageTimes(**{field.name: to_duration(0.5) for field in pb.StageTimes.DESCRIPTOR.fields})
    (end,) = Reader().read(rpb.GenerateResponse(finished=pb.Finished(times=wire)))
    assert isinstance(end, Finished)
    assert end.times == StageTimes(*[0.5] * 8)
