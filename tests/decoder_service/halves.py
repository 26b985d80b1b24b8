"""Both halves of a model and a store between them, for tests of `Decode` message by message. There is no router."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from chiasm.cache.memory import MemoryStore
from chiasm.media.sample import spread
from chiasm.media.types import Rgb
from chiasm.models.family import MediumPlan
from chiasm.models.registry import Model, find
from chiasm.rpc.times import to_duration
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from decoder_service.engine import DecoderEngine
from decoder_service.model import MAX_UNITS, DecoderModel
from decoder_service.servicer import DecoderServicer
from encoder_service.announcing import Announcing
from encoder_service.engine import EncoderEngine
from tests.decoder_service.oracle import grid_of, span_of

ROOT = bytes(32)
SIDE = 4
"""Patches of a side of a digit's frame; it has SIDE * SIDE / 4 visual tokens and a separator."""

Message = dpb.DecodeOpen | dpb.DecodeSized | dpb.DecodeReady | dpb.DecodeClose | dpb.DecodeAppend | dpb.DecodeDrop
_FIELDS = {
    dpb.DecodeOpen: "open",
    dpb.DecodeSized: "sized",
    dpb.DecodeReady: "ready",
    dpb.DecodeClose: "close",
    dpb.DecodeAppend: "append",
    dpb.DecodeDrop: "drop",
}


def wrapped(message: Message) -> dpb.DecodeRequest:
    return dpb.DecodeRequest(**{_FIELDS[type(message)]: message})  # type: ignore[arg-type]


@dataclass
class Told:
    """What one call was told; of the first of its sequences, and the ids and the ends of all."""

    ids: list[int] = field(default_factory=list)
    text: bytes = b""
    admitted: dpb.DecodeAdmitted | None = None
    started: pb.Started | None = None
    finished: pb.Finished | None = None
    sequences: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[int, pb.Finished] = field(default_factory=dict)

    def note(self, response: dpb.DecodeResponse) -> None:
        which = response.WhichOneof("message")
        if which == "tokens":
            ids = self.sequences[response.tokens.sequence]
            assert response.tokens.index == len(ids), "indices come once and in order"
            ids.extend(response.tokens.ids)
            if not response.tokens.sequence:
                self.ids.extend(response.tokens.ids)
                self.text += response.tokens.text
        elif which == "admitted":
            self.admitted = response.admitted
        elif which == "started":
            self.started = response.started
        elif which == "finished":
            assert response.finished.sequence not in self.ends, "a sequence ends once"
            self.ends[response.finished.sequence] = response.finished
            if not response.finished.sequence:
                self.finished = response.finished
                self.text += response.finished.text


class Halves:
    """A decoder, and an encoder that makes entries for it."""

    def __init__(
        self,
        model: Model,
        *,
        dtype: torch.dtype,
        text_tokens: int,
        visual_tokens: int,
        max_rows: int,
        max_units: int = MAX_UNITS,
        max_running: int | None = None,
        page_size: int = 16,
        deterministic: bool = False,
    ) -> None:
        fingerprint, secret = model.checkpoint.fingerprint, bytes(range(32))
        self.model = model
        self.span = span_of(model.processor)
        self.store = MemoryStore(1 << 26)
        self.encoder = EncoderEngine(
            model.encoder(dtype=dtype),
            model.processor,
            fingerprint=fingerprint,
            store=self.store,
            workers_secret=secret,
        )
        engine = DecoderEngine(
            model.decoder(dtype=dtype),
            model.processor,
            text_tokens=text_tokens,
            visual_tokens=visual_tokens,
            page_size=page_size,
            deterministic=deterministic,
        )
        self.decoder = DecoderModel(
            engine,
            model.prompt(),
            fingerprint=fingerprint,
            text_fingerprint=model.text_fingerprint,
            store=self.store,
            workers_secret=secret,
            max_rows=max_rows,
            max_units=max_units,
            max_running=max_running,
        )
        self.servicer = DecoderServicer(self.decoder, name="digits", family=model.family.name)

    def opened(
        self, *parts: str | int, max_tokens: int | None = None, kind: int = pb.MEDIA_KIND_VIDEO
    ) -> dpb.DecodeOpen:
        """One user turn of text and media, by slot."""
        opened = dpb.DecodeOpen(
            model="digits",
            fingerprint=self.decoder.identity_digest,
            tenant_root=ROOT,
            sample=dpb.SAMPLE_MODE_WHEN_CLOSED,
            seed=0,
            attempt=1,
        )
        turn = opened.prompt.conversation.turns.add(role=pb.ROLE_USER)
        for part in parts:
            if isinstance(part, str):
                turn.parts.add(text=part)
            else:
                turn.parts.add(slot=part)
                opened.slots.add(slot=part, kind=kind, item=f"slot {part}")
        if max_tokens is not None:
            opened.sampling.max_tokens = max_tokens
        return opened

    async def ready(self, frames: Sequence[Rgb], *, slot: int = 0) -> list[dpb.DecodeReady]:
        """The frames encoded, as many a unit as the family has, and the messages that hand them over."""
        grid, span = grid_of(frames[0]), self.span
        tokens = self.encoder.processor.unit_layout(grid).vision_tokens
        height, width, _ = frames[0].shape
        plan = MediumPlan("video", len(frames), height, width, grid, tokens, upscaled=False, span=span)
        announcing = Announcing(self.encoder, plan, root=ROOT, seconds=30)

        async def feed() -> None:
            for number in range(plan.units):
                await announcing.start(number, frames[number * span : (number + 1) * span])
            await announcing.end()

        feeding = asyncio.create_task(feed())
        told = [dpb.DecodeReady(slot=slot, unit=ready.unit, entry=ready.entry) async for ready in announcing.ready()]
        await feeding
        return told

    def decode(self, *messages: Message) -> AsyncGenerator[dpb.DecodeResponse, None]:
        """A call that sends these messages at once and then nothing more; it ends its side once it is answered."""
        responses = self.servicer.Decode(sent(messages), None)
        assert isinstance(responses, AsyncGenerator)
        return responses

    async def told(self, *messages: Message) -> Told:
        told = Told()
        async with aclosing(self.decode(*messages)) as responses:
            async for response in responses:
                told.note(response)
        return told

    def assert_empty(self) -> None:
        """Nobody holds anything in either pool, and both are whole once what is kept was flushed; nothing is reserved,
        nothing is pinned."""
        engine = self.decoder.engine
        assert engine.holdings.held == (0, 0) and engine.holdings.promised == (0, 0)
        self.decoder.flush()
        assert engine.pages.free == engine.pages.total
        assert engine.extents.free == engine.extents.total
        assert not self.decoder.running and not self.decoder.waiting
        assert self.store.stats().pinned_bytes == 0


def sized(
    count: int,
    *,
    of: int | None = None,
    slot: int = 0,
    final: bool = True,
    side: int = SIDE,
    revision: int = 1,
    span: int = 1,
) -> dpb.DecodeSized:
    """So many frames, `span` of them a unit, a second apart; or so many `of` that many, taken evenly."""
    shown = spread(of or count, count)
    return dpb.DecodeSized(
        slot=slot,
        revision=revision,
        final=final,
        units=[
            pb.Unit(
                index=unit,
                grid=pb.Grid(t=1, h=side, w=side),
                tokens=side * side // 4 + 1,
                frames=[
                    pb.UnitFrame(file_index=i, frame_offset=to_duration(float(shown[i])))
                    for i in range(at, min(at + span, count))
                ],
            )
            for unit, at in enumerate(range(0, count, span))
        ],
    )


CLOSE = dpb.DecodeClose()


async def sent(messages: Sequence[Message], *, stays: bool = True) -> AsyncIterator[dpb.DecodeRequest]:
    """The messages of a caller that stays until its call is over, or that has nothing more to say after them."""
    for message in messages:
        yield wrapped(message)
    if stays:
        await asyncio.Event().wait()


@asynccontextmanager
async def halves(
    folder: Path | Model | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    text_tokens: int = 8192,
    visual_tokens: int = 4096,
    max_rows: int = 512,
    max_units: int = MAX_UNITS,
    max_running: int | None = None,
    page_size: int = 16,
    deterministic: bool = False,
) -> AsyncIterator[Halves]:
    """The shipped model, one that is open, or the one in `folder`. Nothing may be left in its pools at the end."""
    system = Halves(
        folder if isinstance(folder, Model) else Model(folder or find("digits")),
        dtype=dtype,
        text_tokens=text_tokens,
        visual_tokens=visual_tokens,
        max_rows=max_rows,
        max_units=max_units,
        max_running=max_running,
        page_size=page_size,
        deterministic=deterministic,
    )
    try:
        yield system
        system.assert_empty()
    finally:
        await system.encoder.close()
        await system.decoder.close()
