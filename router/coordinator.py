"""One request, from its media to its last token: the only place where encoders and a decoder are brought together.

One `Encode` per medium, one `Decode` for the timeline. Sizes are shared among the media, go is given once the decoder
has admitted them, entries are forwarded as they become ready, and nothing is told to the client before the decoder
has begun to answer, which it does only when every medium was decoded to its end. It touches messages, never tensors.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Generic, TypeVar

from google.rpc.status_pb2 import Status

from chiasm.errors import ServerError, StatusError, Unavailable
from chiasm.rpc.limits import CHUNK_BYTES
from chiasm.rpc.status import from_status
from chiasm.rpc.times import to_duration, to_seconds
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.rpc.v1 import encoder_pb2 as epb
from chiasm.rpc.v1 import router_pb2 as rpb
from router import request as checked
from router.fleet import Pair

INITIAL_CREDIT = 64 << 20
"""Bytes of entries a medium may have pinned before any is attached; one unit always passes."""

T = TypeVar("T")


class _Outbox(Generic[T]):
    """Messages of one call in the order in which they are put, until it is ended."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[T | None] = asyncio.Queue()

    def put(self, message: T) -> None:
        self._queue.put_nowait(message)

    def end(self) -> None:
        self._queue.put_nowait(None)

    async def __aiter__(self) -> AsyncGenerator[T, None]:
        while (message := await self._queue.get()) is not None:
            yield message


class _Medium:
    """One medium of the request and the call that encodes it."""

    def __init__(self, slot: int, item: str) -> None:
        self.slot = slot
        self.item = item
        self.requests: _Outbox[epb.EncodeRequest] = _Outbox()
        self.probe: pb.Probe | None = None
        self.ended = False
        self.bytes_of: dict[int, int] = {}  # per unit, of the entry that is pinned
        self.missing: set[int] = set()  # units to be encoded again
        self.again: asyncio.Task[None] | None = None
        self.usage: pb.MediaUsage | None = None
        self.times = pb.StageTimes()


class Coordinator:
    """Serves one checked `GenerateRequest` with one pair of workers.

    Args:
        credit: bytes of entries each medium may have pinned before any is attached.
    """

    def __init__(
        self, request: rpb.GenerateRequest, pair: Pair, *, tenant_root: bytes, credit: int = INITIAL_CREDIT
    ) -> None:
        self._request = request
        self._pair = pair
        self._root = tenant_root
        self._initial_credit = credit
        self._id = secrets.token_bytes(16)
        self._decode: _Outbox[dpb.DecodeRequest] = _Outbox()
        self._events: asyncio.Queue[rpb.GenerateResponse | BaseException | None] = asyncio.Queue()
        items = checked.item_paths(request.prompt)
        self._media = [_Medium(slot, item) for slot, item in enumerate(items)]

    async def run(self) -> AsyncGenerator[rpb.GenerateResponse, None]:
        """The events of the answer. Closing it cancels every call of the request."""
        tasks = [asyncio.create_task(self._guard(self._run_decoder()))]
        tasks += [asyncio.create_task(self._guard(self._run_encoder(medium))) for medium in self._media]
        try:
            while (event := await self._events.get()) is not None:
                if isinstance(event, BaseException):
                    raise event
                yield event
        finally:
            tasks += [medium.again for medium in self._media if medium.again is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _guard(self, work: object) -> None:
        """Whatever goes wrong in one call ends the request, a call that was cancelled from its other end too."""
        try:
            await work  # type: ignore[misc]
        except asyncio.CancelledError:
            self._events.put_nowait(Unavailable("DRAINING", "a worker ended while it was needed", retry_after=1.0))
            raise
        except Exception as error:
            self._events.put_nowait(self._with_item(error))

    def _with_item(self, error: Exception) -> Exception:
        """Names the medium at fault as the client knows it: a worker that found a sibling at fault knows its place
        only."""
        if isinstance(error, StatusError) and error.item is not None and error.item.startswith("media["):
            slot = error.item.removeprefix("media[").removesuffix("]")
            if slot.isdecimal() and int(slot) < len(self._media):
                error.item = self._media[int(slot)].item
        return error

    # -- the decoder's call ----------------------------------------------------------------------------------------

    async def _run_decoder(self) -> None:
        request = self._request
        opened = dpb.DecodeOpen(
            request_id=self._id,
            attempt=1,
            model=request.model,
            fingerprint=self._pair.fingerprint,
            tenant_root=self._root,
            prompt=request.prompt,
            slots=[dpb.Slot(slot=m.slot, kind=request.media[m.slot].kind, item=m.item) for m in self._media],
            sampling=request.sampling,
            seed=checked.seed_of(request.sampling),
            sample=dpb.SAMPLE_MODE_WHEN_CLOSED,
            prompt_visibility=request.prompt_visibility,
        )
        self._decode.put(dpb.DecodeRequest(open=opened))
        self._decode.put(dpb.DecodeRequest(close=dpb.DecodeClose()))
        async with _closing(self._pair.decoder.decode(aiter(self._decode))) as responses:
            async for response in responses:
                self._on_decoder(response)
                if response.HasField("finished"):
                    break
            else:
                raise ServerError("STREAM_BROKEN", "the decoder ended its stream before the answer was finished")
        self._events.put_nowait(None)  # only now: the decoder has given back what the timeline held

    def _on_decoder(self, response: dpb.DecodeResponse) -> None:
        which = response.WhichOneof("message")
        if which == "admitted":
            for medium in self._media:
                medium.requests.put(epb.EncodeRequest(go=epb.EncodeGo()))
        elif which == "attached":
            for unit in response.attached.units:
                self._credit(self._media[unit.slot], unit.unit)
        elif which == "missing":
            self._on_missing(response.missing.unit)
        elif which == "started":
            self._events.put_nowait(rpb.GenerateResponse(started=response.started))
        elif which == "tokens":
            self._events.put_nowait(rpb.GenerateResponse(tokens=response.tokens))
        elif which == "visible":
            self._events.put_nowait(rpb.GenerateResponse(visible=response.visible))
        elif which == "finished":
            finished = response.finished
            finished.usage.media.extend(m.usage for m in self._media if m.usage is not None)
            for name in ("decode_media", "encode"):
                spent = sum(to_seconds(getattr(m.times, name)) for m in self._media)
                getattr(finished.times, name).CopyFrom(to_duration(spent))
            self._events.put_nowait(rpb.GenerateResponse(finished=finished))

    def _on_missing(self, unit: pb.UnitRef) -> None:
        """Asks for a unit again, together with others of its medium that go missing meanwhile."""
        medium = self._media[unit.slot]
        self._credit(medium, unit.unit)  # what is gone pins nothing, and the first call may be waiting for it
        medium.missing.add(unit.unit)
        if medium.again is None or medium.again.done():
            medium.again = asyncio.create_task(self._guard(self._encode_again(medium)))

    def _credit(self, medium: _Medium, unit: int) -> None:
        count = medium.bytes_of.pop(unit, 0)
        if medium.ended:
            self._settle(medium)
        else:
            medium.requests.put(epb.EncodeRequest(credit=epb.EncodeCredit(bytes=count)))

    def _settle(self, medium: _Medium) -> None:
        """Ends the call of a medium that is done, once everything it announced is attached. Until then leaving the call
        makes the encoder take its pins back."""
        if not medium.bytes_of:
            medium.requests.end()

    # -- the encoders' calls ---------------------------------------------------------------------------------------

    async def _run_encoder(self, medium: _Medium) -> None:
        self._send_medium(medium.slot, medium.requests)
        async with _closing(self._pair.encoder.encode(aiter(medium.requests))) as responses:
            async for response in responses:
                self._on_encoder(medium, response)
        if not medium.ended:
            raise ServerError(
                "STREAM_BROKEN", "an encoder ended its stream before its medium was done", item=medium.item
            )

    def _send_medium(self, slot: int, requests: _Outbox[epb.EncodeRequest]) -> None:
        source = self._request.media[slot]
        opened = epb.EncodeOpen(
            request_id=self._id,
            attempt=1,
            slot=slot,
            item=self._media[slot].item,
            model=self._request.model,
            fingerprint=self._pair.fingerprint,
            tenant_root=self._root,
            media=checked.header(source),
            sampling=source.sampling,
            initial_credit=self._initial_credit,
        )
        requests.put(epb.EncodeRequest(open=opened))
        for chunk in checked.chunks(source, CHUNK_BYTES):
            requests.put(epb.EncodeRequest(chunk=chunk))

    def _on_encoder(self, medium: _Medium, response: epb.EncodeResponse) -> None:
        which = response.WhichOneof("message")
        if which == "probed":
            medium.probe = response.probed.probe
            if all(m.probe is not None for m in self._media):
                for m in self._media:
                    m.requests.put(epb.EncodeRequest(siblings=self._siblings()))
        elif which == "sized":
            sized = response.sized
            self._decode.put(
                dpb.DecodeRequest(
                    sized=dpb.DecodeSized(
                        slot=medium.slot, revision=sized.revision, final=sized.final, units=sized.units
                    )
                )
            )
        elif which == "ready":
            medium.bytes_of[response.ready.unit] = response.ready.entry.byte_length
            self._forward(medium.slot, response.ready)
        elif which == "end":
            medium.usage = response.end.usage
            medium.times = response.end.times
            medium.ended = True
            self._settle(medium)
        elif which == "failed":
            _raise(response.failed.status)

    def _siblings(self) -> epb.EncodeSiblings:
        media: Sequence[pb.Media] = self._request.media
        return epb.EncodeSiblings(
            siblings=[epb.Sibling(slot=m.slot, probe=m.probe, sampling=media[m.slot].sampling) for m in self._media]
        )

    def _forward(self, slot: int, ready: epb.EncodeReady) -> None:
        self._decode.put(dpb.DecodeRequest(ready=dpb.DecodeReady(slot=slot, unit=ready.unit, entry=ready.entry)))

    async def _encode_again(self, medium: _Medium) -> None:
        """Calls of their own for units whose entries the decoder could not use, all of a medium that are missing at a
        time. Sizes stay as they were told."""
        while medium.missing:
            wanted, medium.missing = medium.missing, set()
            requests: _Outbox[epb.EncodeRequest] = _Outbox()
            self._send_medium(medium.slot, requests)
            requests.put(epb.EncodeRequest(siblings=self._siblings()))
            ranges = [pb.UnitRange(first=unit, count=1) for unit in sorted(wanted)]
            requests.put(epb.EncodeRequest(go=epb.EncodeGo(units=ranges, afresh=True)))
            async with _closing(self._pair.encoder.encode(aiter(requests))) as responses:
                async for response in responses:
                    which = response.WhichOneof("message")
                    if which == "ready":
                        wanted.discard(response.ready.unit)
                        self._forward(medium.slot, response.ready)
                        requests.put(epb.EncodeRequest(credit=epb.EncodeCredit(bytes=response.ready.entry.byte_length)))
                    elif which == "failed":
                        _raise(response.failed.status)
                    elif which == "end":
                        requests.end()
            if wanted:
                raise ServerError(
                    "ENTRY_MISSING",
                    f"{len(wanted)} units were lost and could not be encoded again",
                    item=medium.item,
                    facts={"units": len(wanted)},
                )


def _closing(responses: AsyncIterator[T]) -> aclosing[AsyncGenerator[T, None]]:
    """Leaving the block ends the call, finished or not."""
    assert isinstance(responses, AsyncGenerator), "calls are async generators, so that they can be closed"
    return aclosing(responses)


def _raise(status: bytes) -> None:
    raise from_status(Status.FromString(status))
