"""Asking a system in one process, for tests: requests built in a line, answers gathered, leaks looked for."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from chiasm.local import LocalService, LocalSettings
from chiasm.rpc.tensor import Gathered
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import router_pb2 as rpb

Part = str | pb.Media


@dataclass
class Answer:
    """Everything one request was told."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    started: pb.Started | None = None
    visible: list[pb.Visible] = field(default_factory=list)
    finished: pb.Finished | None = None
    attempts: list[int] = field(default_factory=list)

    @property
    def media(self) -> Sequence[pb.MediaUsage]:
        assert self.finished is not None
        return self.finished.usage.media

    @property
    def encoded(self) -> int:
        """Units that were not in the store before."""
        return sum(medium.units - medium.units_cached for medium in self.media)


def image(data: bytes, mime: str = "") -> pb.Media:
    return pb.Media(kind=pb.MEDIA_KIND_IMAGE, data=data, mime_type=mime)


def video(data: bytes, **sampling: float | int) -> pb.Media:
    medium = pb.Media(kind=pb.MEDIA_KIND_VIDEO, data=data)
    if sampling:
        medium.sampling.CopyFrom(pb.MediaSampling(**sampling))  # type: ignore[arg-type]
    return medium


def question(
    *parts: Part, model: str = "digits", max_tokens: int = 24, system: str | None = None
) -> rpb.GenerateRequest:
    """One user turn of text and media, greedy."""
    request = rpb.GenerateRequest(model=model)
    turns = request.prompt.conversation.turns
    if system is not None:
        turns.add(role=pb.ROLE_SYSTEM).parts.add(text=system)
    turn = turns.add(role=pb.ROLE_USER)
    for part in parts:
        if isinstance(part, str):
            turn.parts.add(text=part)
        else:
            turn.parts.add(slot=len(request.media))
            request.media.append(part)
    request.sampling.max_tokens = max_tokens
    return request


async def ask(service: LocalService, request: rpb.GenerateRequest) -> Answer:
    """The whole answer."""
    answer = Answer()
    async with aclosing(service.generate(request)) as events:
        async for event in events:
            note(answer, event)
    assert answer.finished is not None, "an answer ends"
    return answer


def note(answer: Answer, event: rpb.GenerateResponse) -> None:
    which = event.WhichOneof("event")
    if which == "started":
        assert answer.started is None and not answer.ids
        answer.started = event.started
    elif which == "tokens":
        assert event.tokens.index == len(answer.ids), "indices come once and in order"
        answer.ids.extend(event.tokens.ids)
        answer.text += event.tokens.text.decode()
    elif which == "visible":
        answer.visible.append(event.visible)
    elif which == "resume_point":
        answer.attempts.append(event.resume_point.attempt)
    elif which == "finished":
        answer.finished = event.finished
        answer.text += event.finished.text.decode()


class Vector(NamedTuple):
    """What a request for one was told."""

    numbers: npt.NDArray[np.float32]
    finished: pb.Finished


def embedding_of(request: rpb.GenerateRequest, **options: Any) -> rpb.EmbedRequest:
    """Asks for the vector of what another asks about."""
    return rpb.EmbedRequest(model=request.model, prompt=request.prompt, media=request.media, **options)


async def embed(service: LocalService, request: rpb.EmbedRequest) -> Vector:
    return await gathered(service.embed(request))


async def gathered(events: AsyncGenerator[rpb.EmbedResponse, None]) -> Vector:
    """The whole vector."""
    vector, ends = Gathered(), list[pb.Finished]()
    async with aclosing(events):
        async for event in events:
            if event.HasField("embedding"):
                assert not ends, "the end comes last"
                vector.add(event.embedding)
            else:
                ends.append(event.finished)
    (finished,) = ends
    assert vector.whole
    return Vector(np.frombuffer(vector.data, dtype=np.float32), finished)


@asynccontextmanager
async def running(model: str = "digits", settings: LocalSettings | None = None) -> AsyncIterator[LocalService]:
    """A system in this process, ended with the block; nothing may be left in its pools then."""
    service = await LocalService.start(model, settings)
    try:
        yield service
        assert_empty(service)
    finally:
        await service.close()


async def forget(service: LocalService) -> None:
    """Drops every entry, pinned or not: for tests in which nobody is left who would take a pin back."""
    for key in service.store.held():
        await service.store.discard(key)


def assert_empty(service: LocalService) -> None:
    """Nobody holds anything in either pool, and both are whole once what is kept was flushed; nothing is in flight,
    nothing is pinned."""
    engine = service.decoder.engine
    assert engine.holdings.held == (0, 0) and engine.holdings.promised == (0, 0)
    service.decoder.flush()
    assert engine.pages.free == engine.pages.total
    assert engine.extents.free == engine.extents.total
    assert not service.encoder.in_flight
    assert service.store.stats().pinned_bytes == 0
