"""One conditioning: a timeline that samples nothing, and the states of all its tokens after chosen layers.

They may be too many to be kept here, so they are told as they come. A decoder that is lost before the first of them is
replaced and nobody sees it. After that another's might differ in the last bit from what was told: the request ends with
DECODER_LOST, and may be asked again. That the pieces are of whole tensors is looked at here; their numbers are not.
"""

from __future__ import annotations

from collections.abc import Sequence

from chiasm.errors import Unavailable
from chiasm.rpc.tensor import GatheredAll
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


class Conditioning(Computing[rpb.ConditionResponse]):
    """Serves one checked `ConditionRequest`. Arguments are those of `Computing`."""

    def __init__(
        self,
        request: rpb.ConditionRequest,
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
        self._tensors = self._none_yet()
        self._started: pb.Started | None = None  # that the client has not been told
        self._told = False
        self._end = pb.Finished()

    def _none_yet(self) -> GatheredAll:
        return GatheredAll(len(self._request.layers), keep=False)

    @property
    def begun(self) -> bool:
        return self._told

    def _opened(self) -> dpb.DecodeOpen:
        asked = self._request
        open_ = laid(asked, self.media)
        open_.seed, open_.sample = 0, dpb.SAMPLE_MODE_NEVER
        open_.states.pooling = dpb.POOLING_NONE
        open_.states.layers.extend(asked.layers)
        open_.states.dtype = asked.dtype or pb.DTYPE_FLOAT32
        return open_

    async def _computed(self) -> list[bytes]:
        return [b"states", *await computed(self._request, self.media)]

    def _begin(self, worker: DecoderWorker) -> Attempt:
        self._tensors, self._started = self._none_yet(), None
        return super()._begin(worker)

    def _count_loss(self, attempt: Attempt, error: Exception) -> None:
        super()._count_loss(attempt, error)
        if self._told:
            raise Unavailable(
                "DECODER_LOST",
                "the decoder was lost while it sent states; ask again",
                retry_after=1.0,
                facts={"tokens": 0, "lost": self._losses},
            ) from error

    async def _on(self, response: dpb.DecodeResponse) -> bool:
        attempt, which = self._attempt, response.WhichOneof("message")
        assert attempt is not None, "a decoder answers an attempt"
        if which == "states":
            self._trial.passed()
            try:
                self._tensors.add(response.states)
            except ValueError as error:
                raise OutOfStep(str(error)) from error
            if self._started is None and not self._told:
                raise OutOfStep("states came before their beginning")
            if self._started is not None:
                self._told = True
                await self._window.put(rpb.ConditionResponse(started=self._started))
                self._started = None
            await self._window.put(rpb.ConditionResponse(states=response.states))
        elif which == "finished":
            if not (self._tensors.whole and response.finished.HasField("usage")):
                raise OutOfStep("states ended before they were whole")
            self._end = response.finished
            return True
        elif which == "started":
            attempt.began = True
            self._started = response.started
        else:
            self._on_timeline(response)
        return False

    async def _tell_end(self) -> None:
        await self._window.put(rpb.ConditionResponse(finished=await self._accounted(self._end)))
