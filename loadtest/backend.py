"""The backend that guidellm's workers ask through: one `chiasm.AsyncClient` a process, one `Record` a request.

It repeats nothing: what a server refuses is counted, not tried again.
"""

from __future__ import annotations

import signal
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any, Final, Literal

from guidellm.backends import Backend
from guidellm.schemas import GenerationRequest, GenerationResponse, RequestInfo
from guidellm.schemas.backends import BackendArgs
from pydantic import Field

from chiasm.client import AsyncClient, FramesVisible, Token
from chiasm.client.stream import AsyncGenerationStream
from chiasm.errors import ChiasmError, Overloaded, StatusError
from loadtest.record import Record
from loadtest.scenarios import Asking, Question

KIND: Final = "chiasm_grpc"

ANSWER: Final = 200
"""Characters of a wrong answer that are kept."""


@BackendArgs.register(KIND)
class ChiasmArgs(BackendArgs):
    """What a worker process is told.

    Attributes:
        open_loop: whether times count from when a request was due.
    """

    kind: Literal["chiasm_grpc"] = KIND
    target: str
    model: str
    scenario: str
    checked: bool
    fresh: bool
    seed: int
    max_tokens: int
    timeout: float = Field(gt=0)
    processes: int = Field(gt=0)
    open_loop: bool


@Backend.register(KIND)
class ChiasmBackend(Backend):
    """Asks a router over gRPC."""

    backend_defines_model = True

    def __init__(self, args: ChiasmArgs) -> None:
        super().__init__(args)
        self._told = args
        self._client: AsyncClient | None = None
        self._asking: Asking | None = None

    @property
    def processes_limit(self) -> int:
        return self._told.processes

    async def default_model(self) -> str:
        return self._told.model

    async def process_startup(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that was asked to measure decides when it ends
        self._client = AsyncClient(self._told.target, max_retries=0, timeout=self._told.timeout)
        self._asking = Asking(self._told.scenario, seed=self._told.seed, fresh=self._told.fresh)

    async def validate(self) -> None:
        """Connects, and has what is asked at hand, so that no request pays for it."""
        assert self._client is not None and self._asking is not None, "it was started"
        self._asking.question(0)
        await self._client.list_models()

    async def process_shutdown(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def resolve(  # type: ignore[override, misc]  # it is declared as a coroutine there, and used as here
        self, request: GenerationRequest, request_info: RequestInfo, history: Any = None
    ) -> AsyncIterator[tuple[GenerationResponse | None, RequestInfo]]:
        assert self._client is not None and self._asking is not None, "it was started"
        number = int(request.columns["number"][0])
        due = request_info.timings.targeted_start if self._told.open_loop else None
        question = self._asking.question(number)
        stream = self._client.stream(self._told.model, question.content, max_tokens=self._told.max_tokens)
        record = await ask(stream, question, Record(number, sent=time.time()), checked=self._told.checked)
        record.late = 0.0 if due is None else max(0.0, record.sent - due)
        request_info.timings.request_start, request_info.timings.request_end = record.sent, record.ended
        yield (
            GenerationResponse(request_id=request.request_id, request_args=None, response_metrics=record.as_dict()),
            request_info,
        )


async def ask(stream: AsyncGenerationStream, question: Question, record: Record, *, checked: bool) -> Record:
    """Follows one answer to its end and fills its record. Errors of the system become part of it."""
    began = time.perf_counter()
    last: float | None = None
    try:
        async with stream:
            async for event in stream:
                now = time.perf_counter()
                if isinstance(event, Token) and event.ids:
                    if last is None:
                        record.first_token = now - began
                    else:
                        record.gaps.append(now - last)
                    last = now
                elif isinstance(event, FramesVisible) and record.first_visible is None:
                    record.first_visible = now - began
    except Overloaded as error:
        record.outcome, record.reason = "refused", error.reason or error.code
    except ChiasmError as error:
        record.outcome, record.reason = "failed", _reason(error)
    else:
        record.outcome = "completed"
        if checked and question.expected is not None:
            record.right = stream.text == question.expected
            record.text = "" if record.right else stream.text[:ANSWER]
    record.whole = time.perf_counter() - began
    record.tokens = len(stream.ids)
    _account(stream, record)
    return record


def _account(stream: AsyncGenerationStream, record: Record) -> None:
    if stream.usage is None or stream.times is None:
        return
    usage = stream.usage
    record.prompt_tokens, record.visual_tokens = usage.prompt_tokens, usage.visual_tokens
    record.units = sum(medium.units for medium in usage.media)
    record.units_cached = sum(medium.units_cached or 0 for medium in usage.media)
    record.stages = {name: spent for name, spent in asdict(stream.times).items() if spent is not None}


def _reason(error: ChiasmError) -> str:
    if isinstance(error, StatusError) and error.reason:
        return error.reason
    return type(error).__name__
