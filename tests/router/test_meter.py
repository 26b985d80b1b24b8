"""What a router counts and logs: every request once, however it ends, and nothing of what it says."""

from __future__ import annotations

import logging
from contextlib import aclosing

import pytest
from prometheus_client import CollectorRegistry

from chiasm.errors import InvalidRequest, NotFound
from chiasm.local import LocalService
from router.meter import Meter
from tests import digits
from tests.asking import ask, image, question, running, video
from tests.e2e.test_requests import settled


def counted(service: LocalService) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(service.router.meter)
    return registry


async def test_every_request_is_counted_and_logged_once_however_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "router.servicer")
    clip = digits.shipped_clips()[0]
    async with running() as service:
        registry = counted(service)
        answer = await ask(service, question("Read the digits.", video(clip.path.read_bytes())))
        with pytest.raises(InvalidRequest):
            await ask(service, question("A secret.", image(b"no picture")))
        with pytest.raises(NotFound):
            await ask(service, question("A secret.", model="other"))
        async with aclosing(service.generate(question("Read the digits.", video(clip.path.read_bytes())))) as events:
            await anext(events)
        await settled(service)
    ended = [
        registry.get_sample_value("chiasm_requests_total", {"operation": "generate", "reason": reason})
        for reason in ("OK", "MEDIA_UNSUPPORTED", "MODEL_NOT_FOUND", "CANCELLED")
    ]
    assert ended == [1, 1, 1, 1]
    assert registry.get_sample_value("chiasm_num_requests_running") == 0
    assert registry.get_sample_value("chiasm_generation_tokens_total") == len(answer.ids)
    assert registry.get_sample_value("chiasm_time_to_first_token_seconds_count") == 1
    assert registry.get_sample_value("chiasm_inter_token_latency_seconds_count") == len(answer.ids) - 1
    lines = [record for record in caplog.records if record.getMessage() == "request"]
    outcomes = [record.__dict__["outcome"] for record in lines]
    assert outcomes == ["ok", "MEDIA_UNSUPPORTED", "MODEL_NOT_FOUND", "cancelled"]
    assert lines[0].__dict__["tokens"] == len(answer.ids)
    assert all(record.__dict__["request_id"] for record in lines)
    assert "secret" not in str([record.__dict__ for record in lines])


def test_counters_are_there_before_anything_was_asked() -> None:
    registry = CollectorRegistry()
    registry.register(Meter())
    for operation in ("generate", "estimate", "upload"):
        labels = {"operation": operation, "reason": "OK"}
        assert registry.get_sample_value("chiasm_requests_total", labels) == 0
