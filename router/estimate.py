"""What a prompt would cost: its media opened and sized by encoders, its timeline laid by a decoder, nothing computed.

The calls are those of an answer, left before any of them touches a device.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing

from chiasm.errors import DeadlineExceeded, InvalidRequest, Overloaded, ServerError
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.rpc.v1 import encoder_pb2 as epb
from chiasm.rpc.v1 import router_pb2 as rpb
from router import request as checked
from router.computing import DECODERS
from router.dispatch import Outbox
from router.encoding import LOST, Encoding
from router.fleet import DecoderWorker, Fleet, Served
from router.laying import laid, sized_at
from router.media import Source
from router.work import Work


class Estimating(Work):
    """Serves one checked `EstimateRequest`. Arguments are those of `Work`."""

    def __init__(
        self,
        request: rpb.EstimateRequest,
        sources: Sequence[Source],
        fleet: Fleet,
        model: Served,
        *,
        tenant_root: bytes,
        deadline: float | None = None,
        tenant: str = "",
    ) -> None:
        items = checked.item_paths(request.prompt, len(request.media))
        super().__init__(
            fleet,
            model,
            request.media,
            sources,
            items,
            tenant_root=tenant_root,
            deadline=deadline,
            credit=1,
            tenant=tenant,
        )
        self._request = request
        self._sized: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> rpb.EstimateResponse:
        """The estimate. A prompt that does not fit is none of the errors: its room is 0, and it is told what would fit.

        Raises ChiasmError; DeadlineExceeded names the stage at which the time was up.
        """
        try:
            async with asyncio.timeout(self.remaining):
                worker = await self.reach_decoder()
                for medium in self.media:
                    self.start(medium.run)
                if self.media:
                    await self._sized
                return self._estimate(await self._laid(worker))
        except TimeoutError:
            stage = self.early_stage or "prefill"
            raise DeadlineExceeded(f"the deadline passed while the estimate was at {stage}", stage=stage) from None
        finally:
            await self.end()

    async def failed(self, error: Exception) -> None:
        if not self._sized.done():
            self._sized.set_exception(error)

    def on_sized(self, encoding: Encoding) -> None:
        if all(medium.sized is not None for medium in self.media) and not self._sized.done():
            self._sized.set_result(None)

    def on_ready(self, encoding: Encoding, ready: epb.EncodeReady) -> None:
        raise ServerError("STREAM_BROKEN", "an encoder announced an entry before it was told to go")

    async def _laid(self, worker: DecoderWorker) -> dpb.DecodeAdmitted:
        """Asks a decoder, and another one if the first is lost or full."""
        losses = 0
        while True:
            try:
                return await self._lay(worker)
            except Overloaded as error:
                if not self.turned_away(worker, error):
                    raise
            except LOST:
                self.fleet.lost(worker)
                losses += 1
                if losses >= DECODERS:
                    raise
            worker = await self.reach_decoder()

    async def _lay(self, worker: DecoderWorker) -> dpb.DecodeAdmitted:
        told: Outbox[dpb.DecodeRequest] = Outbox()
        opened = laid(self._request, self.media)
        opened.request_id, opened.tenant_root, opened.attempt = self.id, self.root, 1
        opened.model, opened.fingerprint, opened.fairness_key = self.model.name, self.model.fingerprint, self.tenant
        opened.seed, opened.sample = 0, dpb.SAMPLE_MODE_ESTIMATE
        told.put(dpb.DecodeRequest(open=opened))
        told.put(dpb.DecodeRequest(close=dpb.DecodeClose()))
        for medium in self.media:
            told.put(sized_at(medium, final=True))
        with worker.busy():
            calls = worker.calls.decode(told.messages(), timeout=self.allowance)
            async with aclosing(calls), worker.heard_of():
                async for response in calls:
                    if response.HasField("admitted"):
                        return response.admitted
        raise ServerError("STREAM_BROKEN", "the decoder ended its stream without an estimate")

    def _estimate(self, admitted: dpb.DecodeAdmitted) -> rpb.EstimateResponse:
        return rpb.EstimateResponse(
            prompt_tokens=admitted.prompt_tokens,
            visual_tokens=admitted.visual_tokens,
            context_limit=admitted.context_limit,
            room=admitted.room,
            media=[_medium(medium) for medium in self.media],
            fits_with=admitted.fits_with,
        )


def _medium(medium: Encoding) -> rpb.MediaEstimate:
    probe, sized = medium.probe, medium.sized
    if probe is None or sized is None:
        raise InvalidRequest("MEDIA_DECODE_FAILED", "the medium was not sized", item=medium.item)
    units = sized.units
    tokens = sum(unit.tokens for unit in units)
    video = probe.kind == pb.MEDIA_KIND_VIDEO
    frames = [frame for unit in units for frame in unit.frames]
    usage = pb.MediaUsage(
        slot=medium.slot,
        kind=probe.kind,
        format=probe.format,
        frames_in_file=probe.frames_in_file,
        frames_used=len(frames),
        grid=pb.Grid(t=sum(unit.grid.t for unit in units), h=units[0].grid.h, w=units[0].grid.w) if units else None,
        tokens=tokens,
        source_size=probe.size,
        resized_size=sized.resized_size,
        frame_offsets=[frame.frame_offset for frame in frames] if video else [],
        flags=probe.flags,
        units=len(units),
    )
    return rpb.MediaEstimate(usage=usage, entry_bytes=tokens * sized.bytes_per_token)
