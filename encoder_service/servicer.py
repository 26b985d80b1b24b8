"""`Encoder` on the wire: who it is, what it refuses, and the frame of one `Encode` call.

open and bytes → probed → siblings → sized → go → entries announced → end (`encoder_service.encoding`). The frames of a
list may come all along the way. A medium at fault ends the call with `failed`, which names it; only the worker's own
faults fail the call itself.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from chiasm.cache import wire
from chiasm.cache.form import Form
from chiasm.errors import InvalidRequest, Overloaded, Unsupported
from chiasm.media.sandbox import Sandbox
from chiasm.media.types import Limits
from chiasm.rpc.line import line
from chiasm.rpc.load import Riding, load_of
from chiasm.rpc.medium import DIGEST_BYTES
from chiasm.rpc.replica import replica
from chiasm.rpc.status import to_status
from chiasm.rpc.times import seconds_left
from chiasm.rpc.turns import Turn, Turns
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import encoder_pb2 as epb
from chiasm.rpc.v1 import encoder_pb2_grpc
from encoder_service.encoding import Encoding
from encoder_service.engine import EncoderEngine
from encoder_service.inbox import Inbox
from encoder_service.material import Material
from encoder_service.memo import Memo
from encoder_service.quarantine import Quarantine

_log = logging.getLogger(__name__)


class EncoderServicer(encoder_pb2_grpc.EncoderServicer):
    """One model's encoder half behind the wire.

    Args:
        name: what requests call the model.
        family: for people.
        limits: of one medium, as the sandbox has them.
        lease: seconds that an announced entry stays pinned if nobody attaches it and the caller does not say.
        me: what it tells of its process; by default of a CPU and no arena.
        turns: its calls, counted and bounded. A medium waits until it is told `go`: before that it waits for others of
            its request, which wait for theirs.
        draining: whether it takes nothing new.
    """

    def __init__(
        self,
        engine: EncoderEngine,
        sandbox: Sandbox,
        *,
        name: str,
        family: str,
        limits: Limits,
        lease: float = 30.0,
        me: pb.Replica | None = None,
        turns: Turns | None = None,
        draining: Callable[[], bool] = lambda: False,
    ) -> None:
        self.engine = engine
        self.sandbox = sandbox
        self.name = name
        self.limits = limits
        self.lease = lease
        self.turns = turns or Turns(max_waiting=1024)
        self.rejections: Counter[str] = Counter()
        """Calls refused for now, by reason."""
        self.quarantine = Quarantine()
        self.memo = Memo(engine.store, identity=engine.identity_digest, workers_secret=engine.workers_secret)
        self._family = family
        self._me = me or replica(device="cpu")
        self._draining = draining

    async def Info(self, request: epb.EncoderInfoRequest, context: Any) -> epb.EncoderInfoResponse:
        model = epb.EncoderModel(
            name=self.name,
            family=self._family,
            fingerprint=self.engine.identity_digest,
            forms=[wire.form_code(form) for form in self.engine.forms],
            dtype=wire.dtype_code(self.engine.identity.dtype),
        )
        limits = epb.EncoderLimits(
            max_media_bytes=self.limits.max_bytes,
            max_pixels=self.limits.max_pixels,
            max_frames=self.limits.max_listed_frames,
            max_patches=self.engine.bounds.max_patches,
            max_units=self.engine.bounds.max_units,
            max_running=self.turns.max_running or 0,
            max_waiting=self.turns.max_waiting,
            max_pinned_bytes=self.engine.store.stats().budget,
        )
        return epb.EncoderInfoResponse(
            replica=self._me, models=[model], limits=limits, load=self.load(), draining=self._draining()
        )

    def load(self) -> pb.Load:
        """How busy it is. Costs are in patches."""
        held = self.engine.store.stats()
        return load_of(self.turns, held.pinned_bytes / held.budget)

    async def Encode(
        self, request_iterator: AsyncIterator[epb.EncodeRequest], context: Any
    ) -> AsyncIterator[epb.EncodeResponse]:
        with line(_log, "encode") as told:
            try:
                with self.turns.enter(seconds_left(context)) as turn:
                    riding = Riding(self.load)
                    async with aclosing(self._encode(request_iterator, turn, told)) as responses:
                        async for response in responses:
                            riding.on(response, last=response.HasField("end"))
                            yield response
            except Overloaded as error:
                self.rejections[error.reason] += 1
                raise

    async def _encode(
        self, requests: AsyncIterator[epb.EncodeRequest], turn: Turn, told: dict[str, object]
    ) -> AsyncGenerator[epb.EncodeResponse, None]:
        inbox = Inbox(requests, max_bytes=self.limits.max_bytes)
        try:
            opened = await inbox.start()
            told |= {"request": opened.request_id.hex(), "attempt": opened.attempt, "slot": opened.slot}
            self._check(opened)
            try:
                material = Material.of(opened, inbox, self.sandbox, self.quarantine)
                encoding = Encoding(
                    self.engine,
                    self.memo,
                    material,
                    opened,
                    inbox,
                    turn,
                    lease=self.lease,
                    form=self.form_of(opened),
                    shared=opened.reader_arena_id not in (b"", self._me.arena_id),
                )
                async with aclosing(encoding.run()) as responses:
                    async for response in responses:
                        if response.HasField("end"):
                            used = response.end.usage
                            told |= {"units": used.units, "cached": used.units_cached, "outcome": "ok"}
                        yield response
            except InvalidRequest as error:
                told["outcome"] = error.reason
                status = to_status(error.at(opened.item)).SerializeToString()
                yield epb.EncodeResponse(failed=epb.EncodeFailed(status=status))
        finally:
            await inbox.close()

    def _check(self, opened: epb.EncodeOpen) -> None:
        if opened.model != self.name or opened.fingerprint != self.engine.identity_digest:
            raise Unsupported("FINGERPRINT_MISMATCH", "this worker serves another model")
        if len(opened.tenant_root) != 32:
            raise InvalidRequest("FIELD_MISSING", "tenant_root is missing", facts={"field": "tenant_root"})
        if opened.HasField("file_digest") and len(opened.file_digest) != DIGEST_BYTES:
            raise InvalidRequest.out_of_range("file_digest", len(opened.file_digest), f"{DIGEST_BYTES} bytes")
        frames = len(opened.media.frames.frames)
        if frames > self.limits.max_listed_frames:
            raise InvalidRequest(
                "TOO_MANY_ITEMS",
                f"{frames} frames are given, {self.limits.max_listed_frames} are taken",
                item=opened.item,
                facts={"got": frames, "limit": self.limits.max_listed_frames},
            )
        if opened.uri:
            raise Unsupported("FEATURE_DISABLED", "this worker fetches no media")
        if opened.HasField("budget"):
            raise Unsupported("FEATURE_DISABLED", "budget is not served", facts={"field": "budget"})
        self.form_of(opened)

    def form_of(self, opened: epb.EncodeOpen) -> Form:
        """The form that was asked for. Raises Unsupported for one that is not made here."""
        if opened.form == pb.ENTRY_FORM_UNSPECIFIED:
            return self.engine.forms[0]
        form = wire.form_of(opened.form)
        if form is None or form not in self.engine.forms:
            made = ", ".join(one.label for one in self.engine.forms)
            got = str(int(opened.form)) if form is None else form.label
            raise Unsupported(
                "FEATURE_DISABLED",
                f"entries of form {got} are not made here, only {made}",
                facts={"field": "form", "got": got, "made": made},
            )
        return form
