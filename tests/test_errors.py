"""Errors as values: copied and sent whole, asked alike whatever their class, and ranges told with what broke them."""

from __future__ import annotations

import copy
from multiprocessing import Pipe

import numpy as np
import pytest

import chiasm
from chiasm import errors
from chiasm.errors import (
    Cancelled,
    CheckpointError,
    ChiasmError,
    ConnectionFailed,
    DeadlineExceeded,
    IdleTimeout,
    InvalidRequest,
    Overloaded,
    StatusError,
)
from chiasm.rpc.status import from_status, to_status


def tree(kind: type[ChiasmError]) -> list[type[ChiasmError]]:
    return [kind, *(below for child in kind.__subclasses__() for below in tree(child))]


TREE = [kind for kind in tree(ChiasmError) if kind.__module__ == errors.__name__]


def example(kind: type[ChiasmError]) -> ChiasmError:
    if issubclass(kind, CheckpointError):
        return kind("digits", ["a is missing", "b is not"])
    if issubclass(kind, DeadlineExceeded):
        return kind("too late", stage="encode", request_id="abc")
    if issubclass(kind, StatusError):
        return kind(
            "SOME_REASON", "it is 3", item="messages[0]", retry_after=0.5, request_id="abc", code="ABORTED",
            facts={"n": 3, "x": 0.5, "yes": True, "s": "t"},
        )  # fmt: skip
    return kind("what it is")


def through_a_pipe(error: ChiasmError) -> ChiasmError:
    here, there = Pipe()
    with here, there:
        here.send(error)
        received = there.recv()
    assert isinstance(received, ChiasmError)
    return received


@pytest.mark.parametrize("kind", TREE)
def test_an_error_that_was_copied_or_sent_is_the_same(kind: type[ChiasmError]) -> None:
    error = example(kind)
    error.add_note("seen twice")
    for again in (copy.copy(error), copy.deepcopy(error), through_a_pipe(error)):
        assert again is not error and type(again) is kind
        assert (again.args, vars(again), str(again)) == (error.args, vars(error), str(error))


def test_a_copy_shares_no_facts() -> None:
    error = InvalidRequest("SOME_REASON", "no", facts={"a": 1})
    copy.copy(error).facts["b"] = 2
    assert error.facts == {"a": 1}


@pytest.mark.parametrize("kind", TREE)
def test_every_class_answers_the_same_questions(kind: type[ChiasmError]) -> None:
    error = kind("A", "b") if issubclass(kind, StatusError) else example(kind)
    assert error.code and error.reason and error.reason.upper() == error.reason
    assert (error.item, error.retry_after, error.retryable, dict(error.facts)) == (None, None, False, {})
    assert error.request_id in (None, "abc")


@pytest.mark.parametrize("kind", [ConnectionFailed, Cancelled, IdleTimeout, DeadlineExceeded])
def test_the_wire_says_what_the_class_says(kind: type[ChiasmError]) -> None:
    error = from_status(to_status(kind("what it is")))
    assert (type(error), str(error), error.code, error.reason) == (kind, "what it is", kind.code, kind.reason)


def test_what_may_be_tried_again_says_so() -> None:
    assert Overloaded("FULL", "full", retry_after=0.0).retryable and not Overloaded("FULL", "full").retryable


def test_the_package_exports_every_error_and_the_sdk() -> None:
    for name in chiasm.__all__:
        assert getattr(chiasm, name) is not None
    assert {kind.__name__ for kind in TREE} <= set(chiasm.__all__)
    assert {"Event", "ModelInfo", "StageTimes"} <= set(chiasm.__all__) <= set(dir(chiasm))
    assert chiasm.NotFound is errors.NotFound
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        chiasm.Nothing  # noqa: B018


@pytest.mark.parametrize(
    ("value", "shown", "fact"),
    [
        (200, "200", 200),
        (200.0, "200", 200.0),
        (0.1, "0.1", 0.1),
        (True, "True", True),
        (float("nan"), "nan", "nan"),
        (float("inf"), "inf", "inf"),
        (10**6000, "a number of 19932 bits", "a number of 19932 bits"),
        (np.float64(1.5), "1.5", 1.5),
        ("wizard", "'wizard'", "wizard"),
        ("\n" * 1000, "'" + "\\n" * 79 + "\\", "\n" * 160),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_out_of_range_is_told_with_its_value(value: object, shown: str, fact: errors.Fact) -> None:
    error = InvalidRequest.out_of_range("field", value, "0 to 1", "messages[0]")
    assert str(error) == f"messages[0]: field is {shown}, must be 0 to 1 [FIELD_OUT_OF_RANGE]"
    assert error.facts == {"field": "field", "value": fact, "range": "0 to 1"}
    assert from_status(to_status(error)).facts == error.facts


def test_a_field_is_not_named_twice() -> None:
    error = InvalidRequest.out_of_range("temperature", 200, "0 to 100", "temperature")
    assert str(error) == "temperature is 200, must be 0 to 100 [FIELD_OUT_OF_RANGE]"
    assert error.item == "temperature"
