"""A live timeline at the decoder half, for tests: frames go in as entries, tokens come out until the model is
silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

from chiasm.cache import wire
from chiasm.cache.store import Lease
from chiasm.local import LocalService
from chiasm.media.types import Rgb
from chiasm.models.family import MediumPlan
from chiasm.rpc.times import to_duration
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from decoder_service.servicer import DecoderServicer

ROOT = bytes(32)


class LiveTimeline:
    """One `Decode` call that samples while it is open. Used as `async with`."""

    def __init__(self, service: LocalService, *, model: str = "digits") -> None:
        self._service = service
        self._servicer = DecoderServicer(service.decoder, name=model, family="moss_vl")
        self._requests: asyncio.Queue[dpb.DecodeRequest | None] = asyncio.Queue()
        self._model = model
        self._frames = 0
        self._event = 0
        self.laid: dict[int, int] = {}
        self.visible: list[pb.Visible] = []

    async def open(self, prompt: str) -> None:
        opened = dpb.DecodeOpen(
            model=self._model,
            fingerprint=self._service.decoder.identity_digest,
            tenant_root=ROOT,
            sample=dpb.SAMPLE_MODE_WHILE_OPEN,
            seed=0,
            attempt=1,
        )
        opened.prompt.conversation.turns.add(role=pb.ROLE_USER).parts.add(text=prompt)
        self._requests.put_nowait(dpb.DecodeRequest(open=opened))
        self.responses = self._servicer.Decode(self._sent(), None)

    async def _sent(self) -> AsyncIterator[dpb.DecodeRequest]:
        while (request := await self._requests.get()) is not None:
            yield request

    async def show(self, rgb: Rgb, offset: float) -> list[int]:
        """Appends a frame and returns the ids drawn until the model is silent again."""
        slot = self._frames
        self._frames += 1
        event = self._next_event()
        engine = self._service.encoder
        grid = (rgb.shape[0] // 16, rgb.shape[1] // 16)
        tokens = engine.processor.unit_layout(grid).vision_tokens
        plan = MediumPlan("image", 1, rgb.shape[0], rgb.shape[1], grid, tokens, upscaled=False)
        lease = Lease.of(30)
        announced = await engine.announce([rgb], plan, root=ROOT, lease=lease)
        entry = wire.announce(announced.contract, announced.place)
        entry.lease.lease_id = lease.id
        unit = pb.Unit(
            index=0,
            grid=pb.Grid(t=1, h=grid[0], w=grid[1]),
            tokens=tokens,
            frames=[pb.UnitFrame(file_index=0, frame_offset=to_duration(offset))],
        )
        slots = [dpb.Slot(slot=slot, kind=pb.MEDIA_KIND_FRAME)]
        for request in (
            dpb.DecodeRequest(append=dpb.DecodeAppend(event=event, slot=slot, slots=slots)),
            dpb.DecodeRequest(sized=dpb.DecodeSized(slot=slot, revision=1, final=True, units=[unit])),
            dpb.DecodeRequest(ready=dpb.DecodeReady(slot=slot, unit=0, entry=entry)),
        ):
            self._requests.put_nowait(request)
        return await self.until_silent(after_event=event)

    def _next_event(self) -> int:
        self._event += 1
        return self._event

    async def say(self, text: str) -> list[int]:
        """Appends a user turn and returns the ids drawn until the model is silent."""
        append = dpb.DecodeAppend(event=self._next_event())
        append.turn.role = pb.ROLE_USER
        append.turn.parts.add(text=text)
        self._requests.put_nowait(dpb.DecodeRequest(append=append))
        return await self.until_silent(after_event=append.event)

    async def until_silent(self, *, after_event: int = 0) -> list[int]:
        ids: list[int] = []
        async for response in self.responses:
            which = response.WhichOneof("message")
            if which == "laid":
                self.laid[response.laid.event] = response.laid.at_index
            elif which == "visible":
                self.visible.append(response.visible)
            elif which == "tokens" and (not after_event or after_event in self.laid):
                ids.extend(response.tokens.ids)
            elif which == "silence" and (not after_event or after_event in self.laid):
                return ids
        raise AssertionError("the timeline ended")

    def send(self, request: dpb.DecodeRequest) -> None:
        """Sends any message, for tests of broken callers."""
        self._requests.put_nowait(request)

    def drop(self, first_visible: int) -> None:
        drop = dpb.DecodeDrop(event=self._next_event(), first_visible=first_visible)
        self._requests.put_nowait(dpb.DecodeRequest(drop=drop))

    async def close(self) -> list[dpb.DecodeResponse]:
        """Closes the timeline and returns what is still told."""
        self._requests.put_nowait(dpb.DecodeRequest(close=dpb.DecodeClose()))
        self._requests.put_nowait(None)
        return [response async for response in self.responses]


async def stream(service: LocalService, prompt: str, frames: Sequence[Rgb]) -> list[list[int]]:
    """The ids drawn after each frame, a second apart."""
    live = LiveTimeline(service)
    await live.open(prompt)
    async with aclosing(live.responses):  # type: ignore[type-var]
        said = [await live.show(frame, float(i)) for i, frame in enumerate(frames)]
        (last,) = [r for r in await live.close() if r.HasField("finished")]
    assert last.finished.reason == pb.FINISH_REASON_CLOSED
    return said
