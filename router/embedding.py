"""One embedding: a timeline that samples nothing, and the state of its last row as one vector.

Its client is told when the vector is whole: a decoder that is lost before is replaced by one that begins anew, and
nobody sees it. That a vector is what was said of it is looked at here; its numbers are not.
"""

from __future__ import annotations

from collections.abc import Sequence

from chiasm.rpc.tensor import Gathered
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.rpc.v1 import router_pb2 as rpb
from router.answer import OutOfStep
from router.attempt import Attempt
from router.computing import INITIAL_CREDIT, Computing
from router.fleet import DecoderWorker, Fleet, Served
from router.laying import computed, laid
from router.media import Source
from router.quarantine import Quarantine
from router.spread import Spread
from router.window import PATIENCE
from router.work import WHOLE


class Embedding(Computing[rpb.EmbedResponse]):
    """Serves one checked `EmbedRequest`. Arguments are those of `Computing`."""

    def __init__(
        self,
        request: rpb.EmbedRequest,
        sources: Sequence[Source],
        fleet: Fleet,
        model: Served,
        *,
        tenant_root: bytes,
        deadline: float | None = None,
        credit: int = INITIAL_CREDIT,
        spread: Spread = WHOLE,
        patience: float = PATIENCE,
        tenant: str = "",
        quarantine: Quarantine | None = None,
    ) -> None:
        super().__init__(
            request,
            sources,
            fleet,
            model,
            tenant_root=tenant_root,
            deadline=deadline,
            credit=credit,
            spread=spread,
            patience=patience,
            tenant=tenant,
            quarantine=quarantine,
        )
        self._request = request
        self._vector = Gathered()
        self._parts: list[pb.TensorPart] = []
        self._end = pb.Finished()

    def _opened(self) -> dpb.DecodeOpen:
        asked = self._request
        open_ = laid(asked, self.media)
        open_.seed, open_.sample = 0, dpb.SAMPLE_MODE_NEVER
        open_.states.pooling = dpb.POOLING_LAST
        open_.states.dtype = asked.dtype or pb.DTYPE_FLOAT32
        open_.states.normalize = asked.normalize if asked.HasField("normalize") else True
        return open_

    async def _computed(self) -> list[bytes]:
        return [b"embedding", *await computed(self._request, self.media)]

    def _begin(self, worker: DecoderWorker) -> Attempt:
        self._vector, self._parts = Gathered(), []
        return super()._begin(worker)

    async def _on(self, response: dpb.DecodeResponse) -> bool:
        attempt, which = self._attempt, response.WhichOneof("message")
        assert attempt is not None, "a decoder answers an attempt"
        if which == "states":
            self._trial.passed()
            try:
                self._vector.add(response.states)
            except ValueError as error:
                raise OutOfStep(str(error)) from error
            self._parts.append(response.states)
        elif which == "finished":
            if not (self._vector.whole and response.finished.HasField("usage")):
                raise OutOfStep("an embedding ended before it was whole")
            self._end = response.finished
            return True
        elif which == "started":
            attempt.began = True
        else:
            self._on_timeline(response)
        return False

    async def _tell_end(self) -> None:
        finished = await self._accounted(self._end)
        for part in self._parts:
            await self._window.put(rpb.EmbedResponse(embedding=part))
        await self._window.put(rpb.EmbedResponse(finished=finished))
