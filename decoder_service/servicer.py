"""`Decoder` on the wire: who it is, what it refuses, and what it counts of the calls that it lets in."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from chiasm.cache import wire
from chiasm.errors import InvalidRequest, Overloaded, Unsupported
from chiasm.pulse import Standing
from chiasm.rpc.cost import BYTES_PER_TOKEN, answer_tokens
from chiasm.rpc.line import line
from chiasm.rpc.load import Riding, load_of
from chiasm.rpc.replica import replica
from chiasm.rpc.times import seconds_left
from chiasm.rpc.turns import Turn, Turns
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.rpc.v1 import decoder_pb2_grpc
from decoder_service.decoding import Decoding
from decoder_service.model import DecoderModel

_log = logging.getLogger(__name__)

_MODES = (
    dpb.SAMPLE_MODE_WHEN_CLOSED,
    dpb.SAMPLE_MODE_WHILE_OPEN,
    dpb.SAMPLE_MODE_NEVER,
    dpb.SAMPLE_MODE_ESTIMATE,
)
_CUT_MODES = (dpb.SAMPLE_MODE_NEVER, dpb.SAMPLE_MODE_ESTIMATE)
_DRAWING = (dpb.SAMPLE_MODE_WHEN_CLOSED, dpb.SAMPLE_MODE_WHILE_OPEN)


class DecoderServicer(decoder_pb2_grpc.DecoderServicer):
    """One model's decoder half behind the wire.

    Args:
        name: what requests call the model.
        family: for people.
        me: what it tells of its process; by default of a CPU and no arena.
        turns: its calls, counted and bounded. A timeline waits until it is admitted: the pools say how many run.
        draining: whether it takes nothing new.
        standing: of the process.

    Attributes:
        rejections: calls refused for now, by reason.
        finished: sequences that ended, by reason.
        prompt_tokens, visual_tokens, generation_tokens: of the timelines that were admitted.
    """

    def __init__(
        self,
        model: DecoderModel,
        *,
        name: str,
        family: str,
        me: pb.Replica | None = None,
        turns: Turns | None = None,
        draining: Callable[[], bool] = lambda: False,
        standing: Callable[[], Standing] = Standing,
    ) -> None:
        self.model = model
        self.name = name
        self.turns = turns or Turns(max_waiting=256)
        self.rejections: Counter[str] = Counter()
        self.finished: Counter[str] = Counter()
        self.prompt_tokens = 0
        self.visual_tokens = 0
        self.generation_tokens = 0
        self._family = family
        self._me = me or replica(device="cpu")
        self._draining = draining
        self._standing = standing

    async def Info(self, request: dpb.DecoderInfoRequest, context: Any) -> dpb.DecoderInfoResponse:
        engine = self.model.engine
        model = dpb.DecoderModel(
            name=self.name,
            family=self._family,
            fingerprint=self.model.identity_digest,
            forms=[wire.form_code(form) for form in self.model.forms],
            dtype=wire.dtype_code(engine.half.dtype),
            context_limit=self.model.context_limit,
            layers=engine.half.layers_total,
            modes=_MODES if engine.half.headed else _CUT_MODES,
            poolings=[dpb.POOLING_NONE, *([dpb.POOLING_LAST] if engine.half.headed else [])],
            vocabulary=self.model.vocabulary,
            text_fingerprint=self.model.text_fingerprint,
        )
        limits = dpb.DecoderLimits(
            self_pool_tokens=engine.pages.total * engine.pages.page_size,
            cross_pool_tokens=engine.extents.total,
            max_running=self.model.scheduler.max_running,
            max_waiting=self.turns.max_waiting,
        )
        standing = self._standing()
        return dpb.DecoderInfoResponse(
            replica=self._me,
            models=[model],
            limits=limits,
            load=self.load(),
            draining=self._draining(),
            missing=standing.missing,
            stalled=standing.stalled,
        )

    def load(self) -> pb.Load:
        """How busy it is. Costs are in tokens."""
        return load_of(self.turns, max(self.usage().values()))

    def usage(self) -> dict[str, float]:
        """The share of each pool that requests hold, from 0 to 1. What is only kept for others counts as free."""
        engine = self.model.engine
        held = engine.holdings.held
        return {"self": held.pages / engine.pages.total, "cross": held.visual / engine.extents.total}

    async def Decode(
        self, request_iterator: AsyncIterator[dpb.DecodeRequest], context: Any
    ) -> AsyncIterator[dpb.DecodeResponse]:
        with line(_log, "decode") as told:
            try:
                with self.turns.enter(seconds_left(context)) as turn:
                    riding = Riding(self.load)
                    async with aclosing(self._decode(request_iterator, turn, told)) as responses:
                        async for response in responses:
                            last = response.HasField("finished") and response.finished.HasField("usage")
                            riding.on(response, last=last)
                            yield response
            except Overloaded as error:
                self.rejections[error.reason] += 1
                raise

    async def _decode(
        self, requests: AsyncIterator[dpb.DecodeRequest], turn: Turn, told: dict[str, object]
    ) -> AsyncGenerator[dpb.DecodeResponse, None]:
        first = await anext(requests, None)
        if first is None or not first.HasField("open"):
            raise InvalidRequest("UPLOAD_PROTOCOL", "a timeline begins with open")
        told |= {"request": first.open.request_id.hex(), "attempt": first.open.attempt}
        self._check(first.open)
        estimate = first.open.sample == dpb.SAMPLE_MODE_ESTIMATE
        answer = answer_tokens(first.open.sampling) if first.open.sample in _DRAWING else 0
        # What it is known by before its prompt is read and its media are sized.
        turn.weigh(first.open.prompt.ByteSize() // BYTES_PER_TOKEN + answer)
        decoding = Decoding(self.model, first.open)
        del first  # its prompt is read soon, and may be large
        async with aclosing(decoding.run(requests)) as responses:
            async for response in responses:
                if response.HasField("finished") and response.finished.HasField("usage"):
                    used = response.finished.usage
                    told |= {"prompt": used.prompt_tokens, "visual": used.visual_tokens, "drawn": used.output_tokens}
                    told["outcome"] = "ok"  # whether or not the caller stays for the end of the stream
                if not estimate:
                    if response.HasField("admitted"):
                        turn.weigh(response.admitted.prompt_tokens + response.admitted.visual_tokens + answer)
                        await turn.begin()
                    self._count(response)
                yield response

    def _count(self, response: dpb.DecodeResponse) -> None:
        which = response.WhichOneof("message")
        if which == "admitted":
            self.prompt_tokens += response.admitted.prompt_tokens
            self.visual_tokens += response.admitted.visual_tokens
        elif which == "tokens":
            self.generation_tokens += len(response.tokens.ids)
        elif which == "finished":
            name = pb.FinishReason.Name(response.finished.reason)
            self.finished[name.removeprefix("FINISH_REASON_").lower()] += 1

    def _check(self, opened: dpb.DecodeOpen) -> None:
        """Refuses what is for another model, and by name what this release does not do."""
        if opened.model != self.name or opened.fingerprint != self.model.identity_digest:
            raise Unsupported("FINGERPRINT_MISMATCH", "this worker serves another model")
        if len(opened.tenant_root) != 32:
            raise InvalidRequest("FIELD_MISSING", "tenant_root is missing", facts={"field": "tenant_root"})
        if opened.sample not in _MODES:
            raise Unsupported("OPERATION_UNSUPPORTED", f"sample mode {opened.sample} is not served")
        if not opened.HasField("seed"):
            raise InvalidRequest("FIELD_MISSING", "seed is missing", facts={"field": "seed"})
        unbuilt = ["adapter"] if opened.adapter else []
        unbuilt += ["live"] if opened.HasField("live") else []
        if unbuilt:
            raise Unsupported("FEATURE_DISABLED", f"{unbuilt[0]} is not served", facts={"field": unbuilt[0]})
