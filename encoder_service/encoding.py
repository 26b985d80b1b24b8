"""One medium on its way through an encoder: found, sized, told unit by unit, and remembered.

It takes one of two roads. A medium that nobody remembers is decoded to its end. One that is remembered is told by the
keys of its units, and opened only for those whose entries are gone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from chiasm.cache.form import Form
from chiasm.errors import InvalidRequest, ServerError
from chiasm.media.types import Decoded, Frame, Rgb
from chiasm.models.family import MediumFacts, MediumPlan
from chiasm.rpc.times import to_duration, to_seconds
from chiasm.rpc.turns import Turn
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import encoder_pb2 as epb
from encoder_service import convert
from encoder_service.announcing import Announcing
from encoder_service.engine import EncoderEngine
from encoder_service.inbox import Inbox
from encoder_service.material import Material
from encoder_service.memo import Asked, Memo, Remembered

_log = logging.getLogger(__name__)


class Encoding:
    """One medium. Yields what the caller is told, in order.

    Args:
        lease: seconds that an entry stays pinned where the call does not say.
        form: of its entries.
        shared: whoever reads them is on another node.
    """

    def __init__(
        self,
        engine: EncoderEngine,
        memo: Memo,
        material: Material,
        opened: epb.EncodeOpen,
        inbox: Inbox,
        turn: Turn,
        *,
        lease: float,
        form: Form,
        shared: bool = False,
    ) -> None:
        self._engine = engine
        self._memo = memo
        self._material = material
        self._open = opened
        self._inbox = inbox
        self._turn = turn
        self._lease = to_seconds(opened.lease) or lease
        self._form = form
        self._shared = shared
        listed = opened.media.HasField("frames") and convert.kind_of(opened.media.kind) == "video"
        self._options = convert.sampling_options(opened.sampling, every_frame=listed)
        self._told = opened.HasField("file_digest")  # what its bytes are
        self._bytes_wanted = not self._told
        self._fetched = 0.0  # seconds of fetching before the encoding began

    async def run(self) -> AsyncGenerator[epb.EncodeResponse, None]:
        """From opening to end."""
        self._material.check()
        found = await self._memo.probe(self._asked) if self._told else None
        probed = None
        if found is None:
            if self._told:
                yield self._want_bytes(None)
            probed = await self._material.probe()
            MediumFacts.of(probed, self._options)  # refuses options that this medium cannot satisfy
            found = convert.probe(probed, self._options, self._open.media.kind)
        yield epb.EncodeResponse(probed=epb.EncodeProbed(probe=found, bytes_wanted=self._bytes_wanted))
        plan = self._plan((await self._inbox.siblings()).siblings)
        remembered = None if self._bytes_wanted else await self._memo.units(self._asked, plan)
        if remembered is not None:
            road = self._by_memory(plan, found, remembered)
        else:
            if not self._bytes_wanted:
                yield self._want_bytes(found)
            if probed is None:
                await self._material.probe()
            road = self._by_decoding(plan, found)
        async with aclosing(road) as responses:
            async for response in responses:
                yield response

    @property
    def _asked(self) -> Asked:
        opened = self._open
        return Asked(opened.tenant_root, opened.file_digest, opened.media.kind, self._options, self._form)

    def _want_bytes(self, found: pb.Probe | None) -> epb.EncodeResponse:
        self._bytes_wanted = True
        return epb.EncodeResponse(probed=epb.EncodeProbed(probe=found, bytes_wanted=True))

    def _plan(self, siblings: Sequence[epb.Sibling]) -> MediumPlan:
        """This medium's share, from the same numbers that every sibling's call uses.

        Raises InvalidRequest MEDIA_TOO_LARGE for units that could never be encoded here.
        """
        slots = [sibling.slot for sibling in siblings]
        if self._open.slot not in slots:
            raise InvalidRequest("FIELD_MISSING", "the siblings leave this medium out", facts={"slot": self._open.slot})
        plans = self._engine.processor.size([convert.sibling_facts(sibling) for sibling in siblings])
        plan = plans[slots.index(self._open.slot)]
        self._engine.check(plan.grid)
        tenant = self._open.fairness_key.encode() or self._open.tenant_root
        self._turn.weigh(plan.units * plan.grid[0] * plan.grid[1], tenant)
        return plan

    # -- by decoding it ----------------------------------------------------------------------------------------------

    async def _by_decoding(self, plan: MediumPlan, found: pb.Probe) -> AsyncGenerator[epb.EncodeResponse, None]:
        """Decodes the medium to its end, and remembers what became of it; or a part of it, of which the rest is left to
        other calls.

        Frames make up units as they come, so that one that cannot be decoded leaves no gap; the last `sized` says which
        frames they are.
        """
        offsets = self._material.probed.frame_offsets
        indices = self._engine.processor.pick(offsets, self._options, plan.frames)
        sized = self._sized(plan, indices, revision=1)
        yield epb.EncodeResponse(sized=sized)
        go = await self._inbox.go()
        await self._turn.begin()
        began, self._fetched = time.monotonic(), self._material.fetching
        async with self._announcing(plan, go) as announcing:
            came: list[int] = []
            decoded: Decoded | None = None

            def number(frame: Frame) -> int:
                came.append(frame.index)
                return plan.units_of(len(came)) - 1

            async with aclosing(self._encode(announcing, plan, go, indices, number)) as events:
                async for event in events:
                    if isinstance(event, Decoded):
                        decoded = event
                    else:
                        yield epb.EncodeResponse(ready=event)
            usage = None
            if decoded is not None:
                sized = self._sized(plan, came, revision=2, final=True)
                yield epb.EncodeResponse(sized=sized)
                if not go.part:
                    usage = convert.usage(plan, came, self._material.probed, decoded, self._open.media.kind)
                    await self._remember(plan, found, sized, usage, announcing)
            yield self._end(usage, announcing, began)
            await self._inbox.ended()

    async def _remember(
        self, plan: MediumPlan, found: pb.Probe, sized: epb.EncodeSized, usage: pb.MediaUsage, announcing: Announcing
    ) -> None:
        """Remembers a medium, if it is what the caller said it was."""
        digest = self._material.digest
        assert digest is not None, "it was decoded to its end"
        if self._material.mistold:
            _log.warning("digest", extra={"request": self._open.request_id.hex(), "slot": self._open.slot})
            return
        known = epb.EncodeSized()
        known.CopyFrom(sized)
        for unit in known.units:
            unit.key = announcing.keys[unit.index]
        await self._memo.remember(self._asked._replace(digest=digest), plan, found, Remembered(known, usage))

    # -- by what is remembered of it -----------------------------------------------------------------------------------

    async def _by_memory(
        self, plan: MediumPlan, found: pb.Probe, remembered: Remembered
    ) -> AsyncGenerator[epb.EncodeResponse, None]:
        """Tells the wanted units by their keys. Only those whose entries are gone, or are to be made afresh, are
        decoded, and only for them are bytes asked for."""
        sized, usage = remembered
        sized.revision = 1
        yield epb.EncodeResponse(sized=sized)
        go = await self._inbox.go()
        began = time.monotonic()
        async with self._announcing(plan, go) as announcing:
            gone: dict[int, pb.Unit] = {}  # by the index of each of its frames
            for unit in sized.units:
                if convert.wants(go, unit.index):
                    ready = None if go.afresh else await self._find(announcing, plan, unit)
                    if ready is None:
                        gone |= dict.fromkeys((frame.file_index for frame in unit.frames), unit)
                    else:
                        yield epb.EncodeResponse(ready=ready)
            if gone:
                yield self._want_bytes(found)
                await self._turn.begin()
                async with aclosing(self._again(announcing, plan, go, gone)) as again:
                    async for ready in again:
                        yield epb.EncodeResponse(ready=ready)
            else:
                self._memo.spared += self._open.media.byte_length
            yield self._end(None if go.part else usage, announcing, began)
            await self._inbox.ended()

    async def _find(self, announcing: Announcing, plan: MediumPlan, unit: pb.Unit) -> epb.EncodeReady | None:
        cost = self._engine.entry_bytes(plan.tokens, self._form)
        await self._inbox.spend(cost)
        ready = await announcing.find(unit.index, unit.key)
        if ready is None:
            self._inbox.give_back(cost)
        return ready

    async def _again(
        self, announcing: Announcing, plan: MediumPlan, go: epb.EncodeGo, gone: dict[int, pb.Unit]
    ) -> AsyncGenerator[epb.EncodeReady, None]:
        """Decodes and encodes some of the units of a medium that is remembered.

        Raises ServerError MEMO_STALE if anything else comes of it than is remembered.
        """
        keys = {unit.index: unit.key for unit in gone.values()}
        making = self._encode(announcing, plan, go, sorted(gone), lambda frame: gone[frame.index].index)
        try:
            async with aclosing(making) as events:
                async for event in events:
                    if isinstance(event, epb.EncodeReady):
                        if event.entry.key != keys.pop(event.unit):
                            raise await self._stale(plan)
                        yield event
        except InvalidRequest as error:
            if self._material.mistold:
                raise await self._stale(plan) from error
            raise
        if keys:
            raise await self._stale(plan)

    async def _stale(self, plan: MediumPlan) -> ServerError:
        """Forgets the medium: it is decoded otherwise now, as by another release of a decoder. This caller was told
        what is so no more; asked again, the medium is an unknown one."""
        await self._memo.forget(self._asked, plan)
        return ServerError(
            "MEMO_STALE", "the medium is not what it was remembered to be", item=self._open.item, retry_after=0.1
        )

    # -- both ----------------------------------------------------------------------------------------------------------

    def _announcing(self, plan: MediumPlan, go: epb.EncodeGo) -> Announcing:
        root = self._open.tenant_root
        share = self._engine.share(root, key=self._open.fairness_key.encode(), priority=self._open.priority)
        return Announcing(
            self._engine,
            plan,
            root=root,
            seconds=self._lease,
            form=self._form,
            afresh=go.afresh,
            share=share,
            shared=self._shared,
        )

    def _sized(
        self, plan: MediumPlan, indices: Sequence[int], *, revision: int, final: bool = False
    ) -> epb.EncodeSized:
        offsets, cost = self._material.probed.frame_offsets, self._engine.bytes_per_token(self._form)
        return convert.sized(plan, indices, offsets, revision=revision, bytes_per_token=cost, final=final)

    async def _encode(
        self,
        announcing: Announcing,
        plan: MediumPlan,
        go: epb.EncodeGo,
        indices: Sequence[int],
        number: Callable[[Frame], int],
    ) -> AsyncGenerator[epb.EncodeReady | Decoded, None]:
        """Decodes frames and encodes those that are wanted, telling units as they are done while others are decoded.
        How the decoding ended comes last, but for a part of a medium, which has no end.

        Args:
            number: which unit a frame belongs to; asked for each as it comes. Those of a unit come one after another.
        """
        feeding = asyncio.create_task(self._feed(announcing, plan, go, indices, number))
        try:
            async with aclosing(announcing.ready()) as told:
                async for ready in told:
                    yield ready
            decoded = await feeding
            if decoded is not None:
                yield decoded
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)

    async def _feed(
        self,
        announcing: Announcing,
        plan: MediumPlan,
        go: epb.EncodeGo,
        indices: Sequence[int],
        number: Callable[[Frame], int],
    ) -> Decoded | None:
        """Starts each wanted unit as soon as its frames have come. Returns how the decoding ended."""
        enough = max((run.first + run.count for run in go.units), default=0) if go.part else None
        decoded: Decoded | None = None
        unit, held = 0, list[Rgb]()
        try:
            if not (go.part and go.none):
                async with aclosing(self._material.decode(indices, self._turn.aside)) as frames:
                    async for frame in frames:
                        if isinstance(frame, Decoded):
                            decoded = frame
                            break
                        before, unit = unit, number(frame)
                        if unit != before:
                            await self._give(announcing, plan, go, before, held)
                        held.append(frame.rgb)
                        del frame  # it is as large as the picture, and the next may be long in coming
                        if len(held) == plan.span:
                            await self._give(announcing, plan, go, unit, held)
                            if unit + 1 == enough:
                                break
                await self._give(announcing, plan, go, unit, held)
            await announcing.end()
        except Exception as error:
            await announcing.end(error)
            raise
        return decoded

    async def _give(
        self, announcing: Announcing, plan: MediumPlan, go: epb.EncodeGo, unit: int, held: list[Rgb]
    ) -> None:
        """Sends the frames of a unit on their way if they are wanted, and keeps none of them."""
        if held and convert.wants(go, unit):
            await self._inbox.spend(self._engine.entry_bytes(plan.tokens, self._form))
            await announcing.start(unit, tuple(held))
            held.clear()
            await announcing.resized()
        elif held and not go.part:
            await announcing.name(unit, tuple(held))  # for the memory of the medium
        held.clear()

    def _end(self, usage: pb.MediaUsage | None, announcing: Announcing, began: float) -> epb.EncodeResponse:
        self._turn.finish()  # what is left is to wait for the caller, who may need another call to run meanwhile
        told = None
        if usage is not None:
            told = pb.MediaUsage()
            told.CopyFrom(usage)
            told.slot = self._open.slot
            told.units_cached = announcing.cached
        fetching, decoding = self._material.fetching, self._material.decoding
        encoding = time.monotonic() - began - decoding - (fetching - self._fetched)
        times = pb.StageTimes(
            fetch=to_duration(fetching), decode_media=to_duration(decoding), encode=to_duration(max(encoding, 0.0))
        )
        return epb.EncodeResponse(end=epb.EncodeEnd(usage=told, times=times))
