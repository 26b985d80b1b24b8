"""The system in one process as its caller sees it: what models are called, and faults told as a socket would."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from chiasm.client import AsyncClient
from chiasm.errors import DeadlineExceeded, NotFound, ServerError
from chiasm.local import LocalService
from chiasm.models.registry import SHIPPED
from chiasm.rpc.status import INTERNAL_MESSAGE
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import router_pb2 as rpb
from tests.asking import question, running


async def test_a_model_answers_to_its_name_and_to_what_it_was_opened_as(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "ckpt"
    shutil.copytree(SHIPPED / "digits", folder)
    monkeypatch.chdir(folder)
    for given in (f"{folder}/", "."):
        async with AsyncClient.in_process(given) as client:
            assert [model.name for model in await client.list_models()] == ["ckpt"]
            for name in ("ckpt", given):
                assert (await client.generate(name, "hello", max_tokens=1)).usage.output_tokens == 1
            with pytest.raises(NotFound) as caught:
                await client.generate("digits", "hello", max_tokens=1)
            assert caught.value.facts == {"model": "digits", "models": "ckpt"}
            assert "only ckpt" in caught.value.message


class Failing:
    """A router with a bug."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def generate(
        self,
        request: rpb.GenerateRequest,
        *,
        timeout: float | None,  # noqa: ASYNC109 - the signature of a router
    ) -> AsyncGenerator[rpb.GenerateResponse, None]:
        yield rpb.GenerateResponse()
        raise self.error

    async def estimate(self, request: rpb.EstimateRequest, **options: Any) -> rpb.EstimateResponse:
        raise self.error

    async def upload(self, requests: AsyncIterator[rpb.UploadRequest]) -> rpb.UploadResponse:
        async for _ in requests:
            pass
        raise self.error


async def drain(service: LocalService, timeout: float | None) -> None:  # noqa: ASYNC109 - passed on
    async with aclosing(service.generate(question("hello"), timeout=timeout)) as responses:
        async for _ in responses:
            pass


@pytest.mark.parametrize("fault", [KeyError("secret"), TimeoutError("secret"), OSError("secret")], ids=repr)
async def test_an_unforeseen_fault_is_told_as_behind_a_socket_and_logged(
    fault: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running() as service:
        monkeypatch.setattr(service, "router", Failing(fault))
        with caplog.at_level(logging.ERROR, "chiasm.local"), pytest.raises(ServerError) as caught:
            await drain(service, 60.0)
        with caplog.at_level(logging.CRITICAL, "chiasm.local"), pytest.raises(ServerError, match=INTERNAL_MESSAGE):
            await service.estimate(rpb.EstimateRequest())
    assert (caught.value.code, caught.value.reason, caught.value.message) == ("INTERNAL", "INTERNAL", INTERNAL_MESSAGE)
    assert caught.value.__cause__ is fault
    (record,) = [record for record in caplog.records if record.name == "chiasm.local"]
    assert record.exc_info is not None and record.exc_info[1] is fault


async def test_a_known_error_and_the_deadline_pass_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as service:
        with pytest.raises(DeadlineExceeded):
            await drain(service, 1e-9)
        refusal = NotFound("MODEL_NOT_FOUND", "nothing here")
        monkeypatch.setattr(service, "router", Failing(refusal))
        with pytest.raises(NotFound) as caught:
            await drain(service, None)
        assert caught.value is refusal


async def test_an_upload_has_its_own_deadline_and_what_its_sender_raises_comes_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def broken() -> AsyncIterator[rpb.UploadRequest]:
        yield rpb.UploadRequest()
        raise OSError("the file is gone")

    async def endless() -> AsyncIterator[rpb.UploadRequest]:
        yield rpb.UploadRequest(
            header=rpb.UploadHeader(upload_id=bytes(16), media=pb.MediaHeader(kind=pb.MEDIA_KIND_IMAGE))
        )
        await asyncio.Event().wait()

    async with running() as service:
        with pytest.raises(DeadlineExceeded) as caught:
            await service.upload(endless(), timeout=0.2)
        assert caught.value.stage == "upload"
        assert len(service.router.uploads) == 0
        monkeypatch.setattr(service, "router", Failing(TimeoutError("nobody foresaw it")))
        with pytest.raises(OSError, match="the file is gone"):
            await service.upload(broken())
