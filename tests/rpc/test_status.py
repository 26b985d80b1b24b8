"""Errors survive the wire: class, code, reason, message, item, stage, request id, typed facts, retry delay."""

from __future__ import annotations

import math

import grpc
import grpc.aio
import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from hypothesis import given
from hypothesis import strategies as st

from chiasm import errors
from chiasm.errors import (
    Cancelled,
    CheckpointError,
    ChiasmError,
    ConnectionFailed,
    DeadlineExceeded,
    Fact,
    IdleTimeout,
    InvalidRequest,
    NotFound,
    Overloaded,
    ServerError,
    StatusError,
    Unavailable,
    Unsupported,
)
from chiasm.rpc import limits
from chiasm.rpc.status import (
    CLASS_OF_CODE,
    DETAILS_KEY,
    DOMAIN,
    INTERNAL_MESSAGE,
    from_rpc_error,
    from_status,
    to_status,
)


def over_the_wire(error: ChiasmError) -> ChiasmError:
    """`error` as the other side sees it, through the bytes of a status."""
    return from_status(Status.FromString(to_status(error).SerializeToString()))


def failed_call(
    code: grpc.StatusCode, *, details: str = "", status: Status | None = None, raw: bytes | None = None
) -> grpc.aio.AioRpcError:
    """What gRPC raises in a client."""
    data = status.SerializeToString() if status else raw
    trailing = grpc.aio.Metadata(*([(DETAILS_KEY, data)] if data is not None else []))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details)


def public_errors() -> list[type[ChiasmError]]:
    """Every class of the tree that a call can end with: not the two roots, nor what ends a process at its start."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ChiasmError)]
    return [kind for kind in kinds if kind not in {ChiasmError, StatusError, CheckpointError}]


def test_the_table_covers_every_code_of_grpc_and_every_class() -> None:
    elsewhere = {"OK", "CANCELLED", "DEADLINE_EXCEEDED"}
    assert set(CLASS_OF_CODE) | elsewhere == {code.name for code in grpc.StatusCode}
    refusals = {kind for kind in public_errors() if issubclass(kind, StatusError)}
    assert set(CLASS_OF_CODE.values()) == refusals


@pytest.mark.parametrize("kind", public_errors())
def test_every_class_comes_back_as_itself(kind: type[ChiasmError]) -> None:
    if issubclass(kind, StatusError):
        error: ChiasmError = kind("SOME_REASON", "3 of 2 fit", facts={"got": 3, "limit": 2})
    else:
        error = kind("it is over")
    found = over_the_wire(error)
    assert type(found) is kind
    assert str(found) == str(error)


@pytest.mark.parametrize(("code", "kind"), CLASS_OF_CODE.items())
def test_a_code_chosen_by_hand_is_kept(code: str, kind: type[StatusError]) -> None:
    found = over_the_wire(kind("SOME_REASON", "text", code=code))
    assert type(found) is kind
    assert found.code == code


facts = st.dictionaries(
    st.text(min_size=1, max_size=20),
    st.one_of(
        st.text(max_size=60),
        st.integers(-(2**70), 2**70),
        st.floats(allow_nan=False),
        st.booleans(),
        st.sampled_from(["1", "1.0", "true", "null", "NaN", '"quoted"', "[1]", "-0", "1e5", "item", "fact.x", ""]),
    ),
    max_size=8,
)
words = st.text(max_size=60)


@given(
    code=st.sampled_from(sorted(CLASS_OF_CODE)),
    reason=st.from_regex(r"X[A-Z0-9_]{0,62}", fullmatch=True),
    message=words,
    item=st.none() | words,
    request_id=st.none() | words.filter(bool),
    retry_after=st.none() | st.integers(0, 10**15).map(lambda nanos: nanos / 1e9).filter(lambda s: s <= 7 * 86_400),
    facts=facts | st.fixed_dictionaries({"item": words, "stage": st.integers(), "fact.item": st.booleans()}),
)
def test_a_refusal_comes_back_equal(
    code: str,
    reason: str,
    message: str,
    item: str | None,
    request_id: str | None,
    retry_after: float | None,
    facts: dict[str, Fact],
) -> None:
    sent = CLASS_OF_CODE[code](
        reason, message, item=item, retry_after=retry_after, request_id=request_id, code=code, facts=facts
    )
    found = over_the_wire(sent)
    assert isinstance(found, StatusError)
    assert type(found) is type(sent)
    assert (found.code, found.reason, found.message, found.item) == (code, reason, message, item)
    assert found.request_id == request_id
    assert found.retryable == sent.retryable
    assert found.retry_after == pytest.approx(retry_after, abs=1e-9)
    assert found.facts == facts
    assert {name: type(fact) for name, fact in found.facts.items()} == {n: type(fact) for n, fact in facts.items()}


@given(message=words, stage=st.none() | st.sampled_from(["queue", "encode"]), request_id=st.none() | st.just("r-1"))
def test_a_deadline_keeps_its_stage(message: str, stage: str | None, request_id: str | None) -> None:
    found = over_the_wire(DeadlineExceeded(message, stage=stage, request_id=request_id))
    assert isinstance(found, DeadlineExceeded)
    assert (str(found), found.stage, found.request_id) == (message, stage, request_id)


def test_the_details_are_those_of_google_rpc() -> None:
    status = to_status(
        Overloaded(
            "QUEUE_FULL", "8 wait, 8 may", item="messages[0]", retry_after=0.25, facts={"waiting": 8, "role": "encoder"}
        )
    )
    info, bad, retry = ErrorInfo(), BadRequest(), RetryInfo()
    assert [detail.Unpack(message) for detail, message in zip(status.details, (info, bad, retry), strict=True)] == [
        True,
        True,
        True,
    ]
    assert (info.reason, info.domain) == ("QUEUE_FULL", DOMAIN)
    assert dict(info.metadata) == {"waiting": "8", "role": "encoder", "item": "messages[0]"}
    assert bad.field_violations[0].field == "messages[0]"
    assert retry.retry_delay.nanos == 250_000_000


def test_an_error_nobody_foresaw_tells_nothing() -> None:
    for error in (ValueError("/etc/secret at 0x7f00"), ChiasmError("bare"), CheckpointError("/models/a", ["b"])):
        found = from_status(to_status(error))
        assert type(found) is ServerError
        assert found.message == INTERNAL_MESSAGE


def test_text_that_protobuf_cannot_hold_is_escaped_and_long_text_is_cut() -> None:
    error = InvalidRequest(
        "MEDIA_UNSUPPORTED", "bad \udce9 name " + "x" * 100_000, facts={"name\udce9": "\udce9" * 10_000}
    )
    status = to_status(error)
    assert status.ByteSize() < limits.METADATA_BYTES // 2
    found = from_status(status)
    assert isinstance(found, StatusError)
    assert found.message.startswith("bad \\udce9 name")


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf, 1e300])
def test_an_absurd_retry_delay_is_bounded(seconds: float) -> None:
    found = from_status(to_status(Overloaded("QUEUE_FULL", "full", retry_after=seconds)))
    assert isinstance(found, Overloaded)
    assert found.retry_after is not None
    assert 0 <= found.retry_after <= 7 * 86_400


def test_an_unknown_reason_is_kept_and_an_unknown_code_is_the_servers_fault() -> None:
    status = Status(code=grpc.StatusCode.NOT_FOUND.value[0], message="gone")
    status.details.add().Pack(ErrorInfo(reason="FROM_THE_FUTURE", domain=DOMAIN, metadata={"a": "1"}))
    found = from_status(status)
    assert isinstance(found, NotFound)
    assert (found.reason, found.facts) == ("FROM_THE_FUTURE", {"a": 1})
    strange = from_status(Status(code=99, message="?"))
    assert type(strange) is ServerError
    assert strange.code == "UNKNOWN"


def test_a_reason_that_is_no_reason_becomes_the_name_of_the_code() -> None:
    status = Status(code=3, message="no")
    status.details.add().Pack(ErrorInfo(reason="not a reason", domain="elsewhere"))
    found = from_status(status)
    assert isinstance(found, InvalidRequest)
    assert found.reason == "INVALID_ARGUMENT"


@given(st.binary(max_size=200))
def test_garbage_in_the_details_is_no_other_error(data: bytes) -> None:
    status = Status(code=8, message="full")
    status.details.add(type_url="type.googleapis.com/google.rpc.ErrorInfo", value=data)
    status.details.add(type_url="type.googleapis.com/google.rpc.RetryInfo", value=data)
    assert isinstance(from_status(status), Overloaded)
    assert isinstance(from_rpc_error(failed_call(grpc.StatusCode.INTERNAL, raw=data)), ChiasmError)


def test_a_failed_call_with_details_is_the_error_that_was_raised() -> None:
    sent = NotFound("MODEL_NOT_FOUND", "no model named b", facts={"model": "b"})
    found = from_rpc_error(failed_call(grpc.StatusCode.NOT_FOUND, details=sent.message, status=to_status(sent)))
    assert isinstance(found, NotFound)
    assert (found.reason, found.facts) == (sent.reason, sent.facts)


def test_a_message_too_large_is_not_worth_another_try() -> None:
    text = "CLIENT: Received message larger than max (5242888 vs. 4194304)"
    found = from_rpc_error(failed_call(grpc.StatusCode.RESOURCE_EXHAUSTED, details=text))
    assert isinstance(found, Overloaded)
    assert (found.reason, found.retryable) == ("MESSAGE_TOO_LARGE", False)
    assert "5242888" not in found.message


@pytest.mark.parametrize(
    ("code", "answered", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, False, ConnectionFailed),
        (grpc.StatusCode.UNAVAILABLE, True, Unavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, False, DeadlineExceeded),
        (grpc.StatusCode.CANCELLED, False, Cancelled),
        (grpc.StatusCode.UNIMPLEMENTED, False, Unsupported),
        (grpc.StatusCode.INTERNAL, False, ServerError),
    ],
)
def test_what_grpc_says_itself_finds_its_class_and_keeps_its_addresses(
    code: grpc.StatusCode, answered: bool, kind: type[ChiasmError]
) -> None:
    found = from_rpc_error(failed_call(code, details="ipv4:10.0.0.1:50051: refused"), answered=answered)
    assert type(found) is kind
    assert "10.0.0.1" not in str(found)


def test_an_idle_client_and_a_deadline_stay_apart() -> None:
    assert type(over_the_wire(IdleTimeout("nothing for 60 s"))) is IdleTimeout
    assert type(over_the_wire(DeadlineExceeded("600 s are over"))) is DeadlineExceeded
