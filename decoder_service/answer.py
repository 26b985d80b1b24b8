"""The answer of one sequence: what the caller is told of the tokens that were drawn, and when it ends.

It is a step or more behind what is drawn: what comes after its end is not told. It knows nothing of entries, pools and
steps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial

from google.protobuf.duration_pb2 import Duration

from chiasm.errors import Unsupported
from chiasm.rpc.times import to_duration
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.timeline import LaidUnit
from decoder_service.drawer import Drawer
from decoder_service.model import DecoderModel
from decoder_service.options import Options
from decoder_service.prefix import prompt_digest
from decoder_service.sampler import Drawn
from decoder_service.seats import Outcome
from decoder_service.sequence import DecodeSequence
from decoder_service.wording import Wording


class Answer:
    """Tokens drawn for one sequence.

    Args:
        number: of the sequence among those of its request.
        emitted: its first tokens, where an earlier attempt has told them.

    Attributes:
        stops: tokens behind which nothing is drawn before something is appended.
        finished: all was told.
    """

    def __init__(
        self,
        model: DecoderModel,
        opened: dpb.DecodeOpen,
        options: Options,
        sequence: DecodeSequence,
        *,
        number: int = 0,
        emitted: Sequence[int] = (),
    ) -> None:
        self._model = model
        self._open = opened
        self._options = options
        self._sequence = sequence
        self._number = number
        self._emitted = emitted  # that is not laid yet
        self._live = opened.sample == dpb.SAMPLE_MODE_WHILE_OPEN
        own: frozenset[int] = frozenset() if options.ignore_eos or self._live else model.prompt.stop_ids
        self._stop_ids = own | options.stop_ids
        silence = {model.silence_id} if self._live and model.silence_id is not None else frozenset()
        self.stops: frozenset[int] = self._stop_ids | silence
        self.drawer = Drawer(
            sequence,
            options,
            number=number,
            banned=model.prompt.banned_ids | options.banned_ids,
            stops=self._stop_ids,
        )
        self._wording = Wording(model, options, self._stop_ids)
        self._out: list[dpb.DecodeResponse] = []
        self._prompt_rows = 0
        self._spared = 0  # of those, when the first token was drawn
        self._seen: tuple[int, int] | None = None  # (first, count) of units, as the caller was last told
        self._closed = False
        self._silent = False
        self._queued = 0.0  # seconds
        self._begun = 0.0  # when it was admitted and when its first token was drawn, by the monotonic clock
        self._first = 0.0
        self._ended = 0.0
        self.finished = False

    async def read_guide(self) -> None:
        """Compiles what the answer must keep to, if there is anything. Comes before the first draw.

        Raises Unsupported for a timeline that grows while it answers, and as `Guides.start` does.
        """
        if self._options.language is None:
            return
        if self._live:
            field = self._options.language.kind
            raise Unsupported(
                "FEATURE_DISABLED", f"{field} is not served while a timeline grows", facts={"field": "guide"}
            )
        ends = [token for token in self._stop_ids if not self._model.token_bytes(token)]
        self.drawer.guide = await self._model.guides.start(self._options.language, ends)

    @property
    def may_draw(self) -> bool:
        """A token may follow the last row laid, as far as the answer is concerned."""
        return not self.finished and (not self._silent if self._live else self._closed)

    @property
    def told(self) -> int:
        """Tokens so far."""
        return self._wording.count

    @property
    def begun(self) -> bool:
        """There was a first token here, or none will come."""
        return self._first > 0 or self.finished

    @property
    def resumes(self) -> bool:
        """What was told of it before is still to be laid."""
        return bool(self._emitted)

    @property
    def room(self) -> int:
        """Tokens that may be drawn behind those that were told."""
        return min(self._wording.limit - self.told, self._model.context_limit - self._sequence.timeline.counter)

    def admit(self, room: int, *, queued: float) -> None:
        """There is room for so many tokens; it was waited for `queued` seconds."""
        self._wording.limit = room
        self._prompt_rows = len(self._sequence.timeline)
        self._queued = queued
        self._begun = time.monotonic()

    def heard(self) -> None:
        """Something was appended: silence is over."""
        self._silent = False

    def close(self) -> None:
        self._closed = True
        if self._live:
            self._finish(pb.FINISH_REASON_CLOSED)

    def tell(self, tokens: Sequence[Outcome]) -> None:
        """Tells the tokens that were drawn, as far as the answer goes. The timeline may have the next one already."""
        for token in tokens:
            assert isinstance(token, Drawn), "the sampler draws it"
            if self.finished:
                return
            if not self._first:
                self._first = time.monotonic()
                if not self.told:
                    self._begin(token.row)
                self._spared = min(self._sequence.spared, self._prompt_rows)
            self._tell_visible()
            self._add(token)

    async def resume(self) -> None:
        """Lays what an earlier attempt has told behind the prompt, which is whole, and goes on where that stopped.
        None of it is told again; that the answer had ended with it is.

        Raises as `Wording.replay`.
        """
        ids, self._emitted = self._emitted, ()
        row, position = len(self._sequence.timeline), self._sequence.timeline.counter
        self._begin(row)
        self.drawer.lay(ids)
        replay = partial(self._wording.replay, ids, position, self.drawer.guide, number=self._number)
        reason = await asyncio.to_thread(replay)  # a long one takes a while
        if reason is not None:
            self._finish(reason)

    def _add(self, token: Drawn) -> None:
        told = self._wording.push(token)
        self._tell(
            tokens=pb.Tokens(
                sequence=self._number,
                attempt=self._open.attempt,
                index=self.told - 1,
                ids=[token],
                text=told.encode("utf-8"),
                logprobs=_told_logprobs(token),
            )
        )
        if self._live and token == self._model.silence_id:
            self._silent = True
            self._tell(silence=pb.Silence(sequence=self._number, attempt=self._open.attempt, index=self.told - 1))
        if (reason := self._wording.end(token, token.position, last=token.ends)) is not None:
            self._finish(reason)

    def responses(self) -> list[dpb.DecodeResponse]:
        """What there is to tell since the last time."""
        out, self._out = self._out, []
        return out

    def _tell(self, **message: object) -> None:
        self._out.append(dpb.DecodeResponse(**message))  # type: ignore[arg-type]

    def _begin(self, row: int) -> None:
        timeline = self._sequence.timeline
        self._prompt_rows = row  # a medium that ended early has left fewer than were admitted
        if self._number:
            return  # the first sequence has told what they share
        frames = [frame for unit in timeline.units for frame in self._frames(unit)]
        visible = timeline.visible().tolist() if self._open.prompt_visibility else []
        self._tell(
            started=pb.Started(
                attempt=self._open.attempt,
                frames=frames,
                prompt_tokens=self._prompt_rows,
                prompt_visible=visible[: self._prompt_rows],
                prompt_digest=prompt_digest(timeline, self._prompt_rows),
            )
        )

    def _frames(self, unit: LaidUnit) -> list[pb.TimelineFrame]:
        slot, number = unit.name
        sized = self._sequence.sized(slot)
        assert sized is not None, "a laid unit was sized"
        rows, columns = sized.grids[number]
        return [
            pb.TimelineFrame(
                slot=slot,
                index=number * sized.span + at,
                unit=number,
                frame_offset=self._offset(slot, seconds),
                grid=pb.Grid(t=1, h=rows, w=columns),
                tokens=unit.layout.vision_tokens,
                at_index=unit.end_index - 1,
            )
            for at, seconds in enumerate(sized.frames_of(number))
        ]

    def _tell_visible(self) -> None:
        timeline = self._sequence.timeline
        seen = (timeline.dropped, len(timeline.units))
        if seen == self._seen:
            return
        self._seen = seen
        last = timeline.units[-1] if seen[1] > seen[0] else None
        self._tell(
            visible=pb.Visible(
                sequence=self._number,
                attempt=self._open.attempt,
                index=self.told,
                first=seen[0],
                count=seen[1],
                last=None if last is None else pb.UnitRef(slot=last.name.slot, unit=last.name.unit),
                visible_until_offset=None if last is None else self._shown_until(last),
            )
        )

    def _shown_until(self, unit: LaidUnit) -> Duration | None:
        """When the last frame of a unit is shown."""
        sized = self._sequence.sized(unit.name.slot)
        return None if sized is None else self._offset(unit.name.slot, sized.frames_of(unit.name.unit)[-1])

    def _offset(self, slot: int, seconds: float) -> Duration | None:
        """When a frame is shown in its medium; None for an image, which has no time."""
        kinds = {one.slot: one.kind for one in self._open.slots}
        return None if kinds.get(slot) == pb.MEDIA_KIND_IMAGE else to_duration(seconds)

    def _finish(self, reason: pb.FinishReason.ValueType) -> None:
        self.finished = True
        self._ended = time.monotonic()
        text, found = self._wording.finish()
        if found is not None and reason == pb.FINISH_REASON_LENGTH:
            reason = pb.FINISH_REASON_STOP
        self._tell(
            finished=pb.Finished(
                sequence=self._number,
                attempt=self._open.attempt,
                reason=reason,
                stop=found or "",
                text=text.encode("utf-8"),
                tokens=self.told,
            )
        )

    def used(self) -> pb.Usage:
        """What the sequence has used."""
        return pb.Usage(
            prompt_tokens=self._prompt_rows,
            visual_tokens=self._sequence.timeline.vision_tokens,
            cached_prompt_tokens=self._spared,
            output_tokens=self.told,
        )

    def times(self) -> pb.StageTimes:
        """Where its time went."""
        first = self._first or self._ended
        return pb.StageTimes(
            queue=to_duration(self._queued),
            prefill=to_duration(first - (self._begun or first)),
            decode=to_duration(self._ended - first),
        )


def _told_logprobs(token: Drawn) -> list[pb.TokenLogprobs]:
    """One element if the request asked for it."""
    if token.logprobs is None:
        return []
    own, top = token.logprobs
    return [
        pb.TokenLogprobs(
            drawn=pb.TokenLogprob(token_id=token, logprob=own),
            top=[pb.TokenLogprob(token_id=other, logprob=logprob) for other, logprob in top],
        )
    ]
