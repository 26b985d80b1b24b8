"""One answer in tokens, from its media to its last token.

Nothing is told to the client before the decoder has begun to answer, which it does only when every medium was decoded
to its end. A decoder that is lost at whatever token is replaced, as any is (`router.computing`): the next one is told
what the client has (`router.answer`) besides, and goes on behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from chiasm.errors import Unavailable
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.rpc.v1 import router_pb2 as rpb
from router import request as checked
from router.answer import Answer
from router.attempt import Attempt
from router.basis import Basis, model_changed
from router.computing import INITIAL_CREDIT, Computing
from router.fleet import DecoderWorker, Fleet, Served, speaks_as
from router.laying import computed, opened
from router.media import Source
from router.quarantine import Quarantine
from router.resume_token import Resumable, ResumeTokens
from router.spread import Spread
from router.window import PATIENCE
from router.work import WHOLE


class Coordinator(Computing[rpb.GenerateResponse]):
    """Serves one checked `GenerateRequest`. Arguments are those of `Computing`, and

    Args:
        resumed: what the token said that came with the request; None for one that begins.

    Attributes:
        seams: as of any, and `resumed` (decoders that went on with it), `repeated` (messages that were not told).
    """

    def __init__(
        self,
        request: rpb.GenerateRequest,
        sources: Sequence[Source],
        fleet: Fleet,
        model: Served,
        *,
        tenant_root: bytes,
        deadline: float | None = None,
        credit: int = INITIAL_CREDIT,
        spread: Spread = WHOLE,
        resumed: Resumable | None = None,
        patience: float = PATIENCE,
        tenant: str = "",
        quarantine: Quarantine | None = None,
    ) -> None:
        super().__init__(
            request,
            sources,
            fleet,
            model if resumed is None else replace(model, text_fingerprint=resumed.text_fingerprint),
            tenant_root=tenant_root,
            deadline=deadline,
            credit=credit,
            spread=spread,
            patience=patience,
            priority=request.priority,
            tenant=tenant,
            quarantine=quarantine,
        )
        self._request = request
        self._basis = Basis(request, model, ResumeTokens(tenant_root), resumed)
        self._number = 0 if resumed is None else resumed.attempt
        self._answer = Answer(checked.sequences(request.sampling), request.resume.emitted)
        self._began = False
        self._end: pb.Finished | None = None  # that the client has not been told
        self._resumed = 0

    @property
    def begun(self) -> bool:
        return self._began

    @property
    def tokens(self) -> int:
        return self._answer.tokens

    @property
    def patient(self) -> bool:
        return self._basis.known  # its client has the beginning of an answer, and nobody else can give it the rest

    @property
    def seams(self) -> dict[str, int]:
        found = {"resumed": self._resumed, "repeated": self._answer.dropped}
        return super().seams | {name: count for name, count in found.items() if count}

    # -- decoders, one after the other -------------------------------------------------------------------------------

    def _opened(self) -> dpb.DecodeOpen:
        open_ = opened(self._request, self.media, seed=self._basis.seed)
        open_.emitted.extend(self._answer.emitted())
        return open_

    async def _computed(self) -> list[bytes]:
        return [b"answer", *await computed(self._request, self.media)]

    async def _choose_decoder(self) -> DecoderWorker:
        """One that can be reached, and of the model that the tokens told so far came from."""
        try:
            worker = await self.reach_decoder()
        except Unavailable as error:
            there = self.fleet.models().get(self.model.name)
            if self._basis.known and error.reason == "NO_READY_DECODER" and there is not None and there.ready:
                raise model_changed() from error  # there are decoders, only none of the same
            raise
        if self._basis.known and not speaks_as(worker, self.model):
            raise model_changed()
        return worker

    def _begin(self, worker: DecoderWorker) -> Attempt:
        self._resumed += self._answer.tokens > 0
        self._answer.reopen()
        return super()._begin(worker)

    # -- what a decoder tells ----------------------------------------------------------------------------------------

    async def _on(self, response: dpb.DecodeResponse) -> bool:
        attempt = self._attempt
        assert attempt is not None, "a decoder answers an attempt"
        which = response.WhichOneof("message")
        if which == "tokens":
            if self._answer.takes_tokens(response.tokens):
                if not attempt.tokens:
                    self._trial.passed()
                attempt.tokens += len(response.tokens.ids)
                await self._window.put(rpb.GenerateResponse(tokens=response.tokens))
        elif which == "visible":
            if self._answer.takes_visible(response.visible):
                await self._window.put(rpb.GenerateResponse(visible=response.visible))
        elif which == "finished":
            return await self._on_finished(response.finished)
        elif which == "started":
            attempt.began = True
            await self._on_started(attempt, response.started)
        else:
            self._on_timeline(response)
        return False

    async def _on_started(self, attempt: Attempt, started: pb.Started) -> None:
        """Tells the client once that the answer begins, and each time how to go on with it. Raises as `Basis.laid`."""
        media = [await medium.source.digest() for medium in self.media]
        texts = attempt.worker.text_fingerprints
        point = self._basis.laid(
            attempt.number, texts.get(self.model.name, b""), media, started.prompt_digest, remaining=self.remaining
        )
        self.model = replace(self.model, text_fingerprint=self._basis.text_fingerprint)
        if not self._began:
            self._began = True
            await self._window.put(rpb.GenerateResponse(started=started))
        await self._window.put(rpb.GenerateResponse(resume_point=point))

    async def _on_finished(self, finished: pb.Finished) -> bool:
        """Whether that was the last word."""
        end = self._answer.takes_finished(finished)
        if end is None:
            return False
        if end.HasField("usage"):
            self._end = end
            return True
        await self._window.put(rpb.GenerateResponse(finished=end))
        return False

    async def _tell_end(self) -> None:
        assert self._end is not None, "a decoder has had its last word"
        await self._window.put(rpb.GenerateResponse(finished=await self._accounted(self._end)))
