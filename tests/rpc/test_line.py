"""The line that ends each call."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator

import pytest

from chiasm.errors import InvalidRequest
from chiasm.rpc.line import line

LOG = logging.getLogger("tests.line")


def last(caplog: pytest.LogCaptureFixture) -> dict[str, object]:
    (record,) = caplog.records
    return {name: getattr(record, name) for name in ("msg", "outcome", "request", "seconds") if hasattr(record, name)}


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, "ok"),
        (InvalidRequest("FIELD_MISSING", "seed is missing"), "FIELD_MISSING"),
        (ZeroDivisionError("secret"), "INTERNAL"),
        (asyncio.CancelledError(), "cancelled"),
    ],
)
def test_it_tells_how_the_call_ended(
    caplog: pytest.LogCaptureFixture, error: BaseException | None, outcome: str
) -> None:
    def call() -> None:
        with line(LOG, "encode") as fields:
            fields["request"] = "r-7"
            if error is not None:
                raise error

    with caplog.at_level(logging.INFO, logger=LOG.name):
        if error is None:
            call()
        else:
            with pytest.raises(type(error)):
                call()
    told = last(caplog)
    assert (told["msg"], told["outcome"], told["request"]) == ("encode", outcome, "r-7")
    assert isinstance(told["seconds"], float)
    assert "secret" not in caplog.text


async def test_a_stream_that_its_reader_closes_was_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    async def stream() -> AsyncGenerator[int, None]:
        with line(LOG, "decode"):
            while True:
                yield 1

    with caplog.at_level(logging.INFO, logger=LOG.name):
        responses = stream()
        await anext(responses)
        await responses.aclose()
    assert last(caplog)["outcome"] == "cancelled"


def test_an_outcome_that_the_call_itself_names_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=LOG.name), line(LOG, "encode") as fields:
        fields["outcome"] = "MEDIA_EMPTY"
    assert last(caplog)["outcome"] == "MEDIA_EMPTY"
