"""What is refused before anything is started: ranges are told with the value that left them."""

from __future__ import annotations

import pytest
from google.protobuf.duration_pb2 import Duration

from chiasm.errors import Fact, InvalidRequest
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import router_pb2 as rpb
from router.request import check_generate
from tests.asking import question


def refusal(request: rpb.GenerateRequest) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        check_generate(request)
    assert caught.value.reason == "FIELD_OUT_OF_RANGE"
    return caught.value


@pytest.mark.parametrize(
    ("field", "value", "shown", "fact"),
    [
        ("temperature", 200.0, "200", 200.0),
        ("temperature", float("nan"), "nan", "nan"),
        ("top_p", 0.0, "0", 0.0),
        ("max_tokens", 0, "0", 0),
        ("n", 17, "17", 17),
    ],
)
def test_an_option_out_of_range_is_told_once_and_with_its_value(
    field: str, value: float, shown: str, fact: Fact
) -> None:
    request = question("hello")
    setattr(request.sampling, field, value)
    error = refusal(request)
    assert str(error).startswith(f"{field} is {shown}, must be ")
    assert (error.item, error.facts["field"], error.facts["value"]) == (field, field, fact)


@pytest.mark.parametrize("priority", [-101, 101])
def test_a_priority_out_of_range_is_told_with_its_value(priority: int) -> None:
    request = question("hello")
    request.priority = priority
    error = refusal(request)
    assert (error.item, error.facts["value"]) == ("priority", priority)


def test_fewest_tokens_beyond_the_most_are_told_with_both() -> None:
    request = question("hello")
    request.sampling.max_tokens, request.sampling.min_tokens = 3, 5
    assert refusal(request).message == "min_tokens is 5, must be at most max_tokens (3)"


@pytest.mark.parametrize("string", ["", "x" * 257, "é" * 129])
def test_a_stop_string_of_no_length_or_of_too_much_is_told_with_its_place(string: str) -> None:
    request = question("hello")
    request.sampling.stop.extend(["END", string])
    error = refusal(request)
    assert (error.item, error.facts["value"]) == ("stop[1]", len(string.encode()))


def test_b133_biases_are_finite_and_of_one_token_each() -> None:
    request = question("hello")
    request.sampling.logit_bias.add(token_id=3, bias=1.0)
    request.sampling.logit_bias.add(token_id=4, bias=float("inf"))
    assert refusal(request).item == "logit_bias[1]"
    request.sampling.logit_bias[1].bias = 2.0
    check_generate(request)
    request.sampling.logit_bias[1].token_id = 3
    assert refusal(request).item == "logit_bias"


def test_a_request_id_is_told_in_bounded_length() -> None:
    request = question("hello")
    request.request_id = "\n" * 10_000
    error = refusal(request)
    assert error.item == "request_id" and len(str(error)) < 300 and "\n" not in str(error)


@pytest.mark.parametrize("where", ["parts", "turns", "plain", "media", "frames", "times", "stop"])
def test_b140_a_list_of_millions_is_refused_by_its_length(where: str) -> None:
    request = question("hello", pb.Media(kind=pb.MEDIA_KIND_VIDEO, data=b"x"))
    many = 300_000
    if where == "parts":
        request.prompt.conversation.turns[0].parts.extend([pb.Part()] * many)
    elif where == "turns":
        request.prompt.conversation.turns.extend([pb.Turn()] * many)
    elif where == "plain":
        request.prompt.plain.parts.extend([pb.Part()] * many)
    elif where == "media":
        request.media.extend([pb.Media()] * many)
    elif where == "frames":
        request.media[0].frames.frames.extend([pb.Frame()] * many)
    elif where == "times":
        request.media[0].sampling.exact_offsets.extend([Duration()] * many)
    else:
        request.sampling.stop.extend(["x"] * many)
    with pytest.raises(InvalidRequest) as caught:
        check_generate(request)
    assert caught.value.reason == "TOO_MANY_ITEMS"
    assert int(caught.value.facts["got"]) >= many > int(caught.value.facts["limit"])


def test_a_mime_type_that_is_none_by_its_length_is_refused_before_it_travels() -> None:
    request = question("hello", pb.Media(kind=pb.MEDIA_KIND_IMAGE, data=b"x"))
    request.media[0].mime_type = "x" * 256
    error = refusal(request)
    assert error.facts["field"] == "mime_type" and len(str(error)) < 400


def test_unknown_roles_and_kinds_are_told_with_their_place() -> None:
    request = question("hello")
    request.prompt.conversation.turns[0].role = 77  # type: ignore[assignment]
    error = refusal(request)
    assert (error.item, error.facts["value"]) == ("messages[0]", 77)
    request = question("hello", pb.Media(kind=pb.MEDIA_KIND_FRAME, data=b"x"))
    error = refusal(request)
    assert (error.facts["field"], error.facts["value"]) == ("kind", pb.MEDIA_KIND_FRAME)
