"""`Decoder` on the wire."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from chiasm import __version__
from chiasm.cache import wire
from chiasm.errors import InvalidRequest, Unsupported
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.rpc.v1 import decoder_pb2_grpc
from decoder_service.decoding import Decoding
from decoder_service.model import DecoderModel

_MODES = (dpb.SAMPLE_MODE_WHEN_CLOSED, dpb.SAMPLE_MODE_WHILE_OPEN)


class DecoderServicer(decoder_pb2_grpc.DecoderServicer):
    """One model's decoder half behind the wire.

    Args:
        name: what requests call the model.
        family: for people.
    """

    def __init__(self, model: DecoderModel, *, name: str, family: str, device: str = "cpu") -> None:
        self._model = model
        self._name = name
        self._family = family
        self._replica = pb.Replica(
            replica_id=secrets.token_bytes(16), node_id="local", version=__version__, device=device
        )

    async def Info(self, request: dpb.DecoderInfoRequest, context: Any) -> dpb.DecoderInfoResponse:
        engine = self._model.engine
        model = dpb.DecoderModel(
            name=self._name,
            family=self._family,
            fingerprint=self._model.identity_digest,
            forms=[wire.form_code(self._model.identity.form)],
            dtype=wire.dtype_code(engine.half.dtype),
            context_limit=self._model.context_limit,
            layers=engine.half.layers_total,
            modes=_MODES,
            vocabulary=self._model.vocabulary,
        )
        limits = dpb.DecoderLimits(
            self_pool_tokens=engine.pages.total * engine.pages.page_size, cross_pool_tokens=engine.extents.total
        )
        return dpb.DecoderInfoResponse(replica=self._replica, models=[model], limits=limits)

    async def Decode(
        self, request_iterator: AsyncIterator[dpb.DecodeRequest], context: Any
    ) -> AsyncIterator[dpb.DecodeResponse]:
        first = await anext(request_iterator, None)
        if first is None or not first.HasField("open"):
            raise InvalidRequest("UPLOAD_PROTOCOL", "a timeline begins with open")
        self._check(first.open)
        async with aclosing(Decoding(self._model, first.open).run(request_iterator)) as responses:
            async for response in responses:
                yield response

    def _check(self, opened: dpb.DecodeOpen) -> None:
        """Refuses what is for another model, and by name what this release does not do."""
        if opened.model != self._name or opened.fingerprint != self._model.identity_digest:
            raise Unsupported("FINGERPRINT_MISMATCH", "this worker serves another model")
        if len(opened.tenant_root) != 32:
            raise InvalidRequest("FIELD_MISSING", "tenant_root is missing", facts={"field": "tenant_root"})
        if opened.sample not in _MODES:
            raise Unsupported("OPERATION_UNSUPPORTED", f"sample mode {opened.sample} is not served")
        if not opened.HasField("seed"):
            raise InvalidRequest("FIELD_MISSING", "seed is missing", facts={"field": "seed"})
        unbuilt = [name for name in ("adapter", "emitted") if getattr(opened, name)]
        unbuilt += [name for name in ("live", "states") if opened.HasField(name)]
        if unbuilt:
            raise Unsupported("FEATURE_DISABLED", f"{unbuilt[0]} is not served", facts={"field": unbuilt[0]})
