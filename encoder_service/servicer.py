"""`Encoder` on the wire: the life of one `Encode` call, from bytes to announced entries.

open and bytes → probed → siblings → sized → go → decoded frame by frame → entries announced → end. A medium at fault
ends the call with `failed`, which names it; only the worker's own faults fail the call itself.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from chiasm.cache import wire
from chiasm.cache.form import Form
from chiasm.errors import InvalidRequest, Overloaded, Unsupported
from chiasm.media.sample import pick
from chiasm.media.sandbox import Sandbox
from chiasm.media.types import Decoded, Limits, Probed
from chiasm.models.family import MediumFacts, MediumPlan
from chiasm.rpc.line import line
from chiasm.rpc.replica import replica
from chiasm.rpc.status import to_status
from chiasm.rpc.times import to_duration, to_seconds
from chiasm.rpc.turns import Turn, Turns
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import encoder_pb2 as epb
from chiasm.rpc.v1 import encoder_pb2_grpc
from encoder_service import convert
from encoder_service.announcing import Announcing
from encoder_service.engine import EncoderEngine
from encoder_service.inbox import Inbox
from encoder_service.material import Material
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
        held = self.engine.store.stats()
        limits = epb.EncoderLimits(
            max_media_bytes=self.limits.max_bytes,
            max_pixels=self.limits.max_pixels,
            max_frames=self.limits.max_listed_frames,
            max_patches=self.engine.max_patches,
            max_running=self.turns.max_running or 0,
            max_waiting=self.turns.max_waiting,
            max_pinned_bytes=held.budget,
        )
        load = pb.Load(
            running=self.turns.running,
            waiting=self.turns.waiting,
            oldest_wait=to_duration(self.turns.oldest_wait),
            pool_usage=held.pinned_bytes / held.budget,
        )
        return epb.EncoderInfoResponse(
            replica=self._me, models=[model], limits=limits, load=load, draining=self._draining()
        )

    async def Encode(
        self, request_iterator: AsyncIterator[epb.EncodeRequest], context: Any
    ) -> AsyncIterator[epb.EncodeResponse]:
        with line(_log, "encode") as told:
            try:
                with self.turns.enter() as turn:
                    async with aclosing(self._encode(request_iterator, turn, told)) as responses:
                        async for response in responses:
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
                async with aclosing(_Encoding(self, opened, inbox, turn).run()) as responses:
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


class _Encoding:
    """One medium on its way. Yields what the caller is told, in order."""

    def __init__(self, servicer: EncoderServicer, opened: epb.EncodeOpen, inbox: Inbox, turn: Turn) -> None:
        self._s = servicer
        self._turn = turn
        self._open = opened
        self._form = servicer.form_of(opened)
        self._inbox = inbox
        self._material = Material(opened, inbox, servicer.sandbox, servicer.quarantine)
        self._revision = 0

    async def run(self) -> AsyncGenerator[epb.EncodeResponse, None]:
        """From opening to end."""
        opened = self._open
        listed = opened.media.HasField("frames") and convert.kind_of(opened.media.kind) == "video"
        options = convert.sampling_options(opened.sampling, every_frame=listed)
        probed = await self._material.probe()
        MediumFacts.of(probed, options)  # refuses options that this medium cannot satisfy
        found = convert.probe(probed, options, opened.media.kind)
        yield epb.EncodeResponse(probed=epb.EncodeProbed(probe=found, bytes_wanted=True))
        siblings = (await self._inbox.siblings()).siblings
        plan = self._plan(siblings)
        indices = pick(probed.frame_offsets, options, plan.units)
        yield self._sized(plan, indices, probed, final=False)
        go = await self._inbox.go()
        await self._turn.begin()
        async with aclosing(self._units(plan, indices, probed, go)) as responses:
            async for response in responses:
                yield response

    def _plan(self, siblings: Sequence[epb.Sibling]) -> MediumPlan:
        """This medium's share, from the same numbers that every sibling's call uses."""
        slots = [sibling.slot for sibling in siblings]
        if self._open.slot not in slots:
            raise InvalidRequest("FIELD_MISSING", "the siblings leave this medium out", facts={"slot": self._open.slot})
        plans = self._s.engine.processor.size([convert.sibling_facts(sibling) for sibling in siblings])
        return plans[slots.index(self._open.slot)]

    async def _units(
        self, plan: MediumPlan, indices: Sequence[int], probed: Probed, go: epb.EncodeGo
    ) -> AsyncGenerator[epb.EncodeResponse, None]:
        """Decodes, encodes and announces, a few units ahead of what is told.

        Units are numbered as their frames come, so that a frame that cannot be decoded leaves no gap; the last
        `sized` says which frames they are.
        """
        engine = self._s.engine
        wanted = [range(run.first, run.first + run.count) for run in go.units]
        seconds = to_seconds(self._open.lease) or self._s.lease
        announcing = Announcing(
            engine, plan, root=self._open.tenant_root, seconds=seconds, form=self._form, afresh=go.afresh
        )
        came: list[int] = []
        clock = time.monotonic
        began = clock()
        waited = 0.0  # for entries and for credit; the rest of the time went into decoding
        try:
            async with aclosing(self._material.decode(indices)) as frames:
                async for frame in frames:
                    if isinstance(frame, Decoded):
                        break
                    came.append(frame.index)
                    if wanted and not any(len(came) - 1 in run for run in wanted):
                        continue
                    paused = clock()
                    if not self._inbox.in_credit:
                        # Credit comes for what is told; what is done and not told yet would be waited for for ever.
                        async for ready in announcing.ready(every=True):
                            yield epb.EncodeResponse(ready=ready)
                    await self._inbox.spend(engine.entry_bytes(plan.tokens, self._form))
                    announcing.start(len(came) - 1, frame.rgb)
                    async for ready in announcing.ready(every=False):
                        yield epb.EncodeResponse(ready=ready)
                    waited += clock() - paused
                else:
                    raise AssertionError("a decoding ends with its count")
            decoding = clock() - began - waited
            yield self._sized(plan, came, probed, final=True)
            async for ready in announcing.ready(every=True):
                yield epb.EncodeResponse(ready=ready)
            self._turn.finish()  # what is left is to wait for the caller, who may need another call to run meanwhile
            usage = self._usage(plan, came, probed, frame, announcing.cached)
            encoding = clock() - began - decoding
            times = pb.StageTimes(decode_media=to_duration(decoding), encode=to_duration(encoding))
            yield epb.EncodeResponse(end=epb.EncodeEnd(usage=usage, times=times))
            await self._inbox.ended()
        except BaseException:
            await announcing.abandon()
            raise

    def _sized(self, plan: MediumPlan, indices: Sequence[int], probed: Probed, *, final: bool) -> epb.EncodeResponse:
        self._revision += 1
        grid = pb.Grid(t=1, h=plan.grid[0], w=plan.grid[1])
        units = [
            pb.Unit(
                index=number,
                grid=grid,
                tokens=plan.tokens,
                frames=[pb.UnitFrame(file_index=i, frame_offset=to_duration(probed.frame_offsets[i]))],
            )
            for number, i in enumerate(indices)
        ]
        sized = epb.EncodeSized(
            revision=self._revision,
            final=final,
            units=units,
            resized_size=pb.Size(height=plan.height, width=plan.width),
            bytes_per_token=self._s.engine.bytes_per_token(self._form),
        )
        return epb.EncodeResponse(sized=sized)

    def _usage(
        self, plan: MediumPlan, indices: Sequence[int], probed: Probed, decoded: Decoded, cached: int
    ) -> pb.MediaUsage:
        altered = [*(["upscaled"] if plan.upscaled else []), *(["truncated"] if decoded.truncated else [])]
        return pb.MediaUsage(
            slot=self._open.slot,
            kind=self._open.media.kind,
            format=probed.found,
            frames_in_file=max(probed.frames_in_file, len(probed.frame_offsets)),
            frames_decoded=decoded.frames,
            frames_used=len(indices),
            grid=pb.Grid(t=len(indices), h=plan.grid[0], w=plan.grid[1]),
            tokens=plan.tokens * len(indices),
            source_size=pb.Size(height=probed.height, width=probed.width),
            resized_size=pb.Size(height=plan.height, width=plan.width),
            frame_offsets=[to_duration(probed.frame_offsets[i]) for i in indices] if plan.kind == "video" else [],
            flags=list(dict.fromkeys([*probed.flags, *decoded.flags, *altered])),
            units=len(indices),
            units_cached=cached,
        )
