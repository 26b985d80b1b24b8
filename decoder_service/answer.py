"""The answer of one timeline: when a token may be drawn, what the caller is told of it, and when it ends.

It draws and counts. It knows nothing of entries, pools and steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np
from google.protobuf.duration_pb2 import Duration

from chiasm.errors import Unsupported
from chiasm.rpc.times import to_duration
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.timeline import LaidUnit
from decoder_service.detokenizer import Detokenizer, NamesControl
from decoder_service.guide import Guide
from decoder_service.model import DecoderModel
from decoder_service.options import read_options
from decoder_service.penalties import Ids, Seen
from decoder_service.sampler import Draw, Drawn
from decoder_service.sequence import DecodeSequence
from decoder_service.stops import StopStrings


class Answer:
    """Tokens drawn for one sequence."""

    def __init__(self, model: DecoderModel, opened: dpb.DecodeOpen, sequence: DecodeSequence) -> None:
        self._model = model
        self._open = opened
        self._sequence = sequence
        self._live = opened.sample == dpb.SAMPLE_MODE_WHILE_OPEN
        self._options = read_options(opened.sampling, opened.seed, model.vocabulary)
        own = frozenset() if self._options.ignore_eos or self._live else model.prompt.stop_ids
        self._stop_ids = own | self._options.stop_ids
        banned = model.prompt.banned_ids | self._options.banned_ids
        self._banned = _ids(banned)
        self._banned_early = _ids(banned | self._stop_ids) if self._options.min_tokens else self._banned
        self._history = Seen()
        self._read = 0  # rows of the timeline that were seen
        self._control = {} if self._options.skip_special_tokens else _control_bytes(model)
        self._detokenizer = Detokenizer()
        self._stops = StopStrings(self._options.stop)
        self._guide: Guide | None = None
        self._out: list[dpb.DecodeResponse] = []
        self._prompt_rows = 0
        self._limit = 0  # tokens of the answer at most
        self._drawn = 0
        self._seen: tuple[int, int] | None = None  # (first, count) of units, as the caller was last told
        self._closed = False
        self._silent = False
        self._queued = 0.0  # seconds
        self._begun = 0.0  # when it was admitted and when its first token was drawn, by the monotonic clock
        self._first = 0.0
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
        self._guide = await self._model.guides.start(self._options.language, ends)

    @property
    def may_draw(self) -> bool:
        """A token may follow the last row laid, as far as the answer is concerned."""
        return not self.finished and (not self._silent if self._live else self._closed)

    @property
    def asked(self) -> int | None:
        """Tokens that the caller wants at most; None for as many as there is room for."""
        return self._options.max_tokens

    @property
    def room(self) -> int:
        """Tokens that may still be drawn."""
        return self._limit - self._drawn

    def admit(self, room: int, *, queued: float) -> None:
        """There is room for so many tokens; it was waited for `queued` seconds."""
        self._limit = room
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

    @property
    def draw(self) -> Draw:
        """How the next token is drawn."""
        early = self._drawn < self._options.min_tokens
        self._read_rows()
        return Draw(
            self._options.drawing,
            index=self._drawn,
            banned=self._banned_early if early else self._banned,
            seen=self._history,
            guide=None if self._guide is None else self._guide.fill,
        )

    def _read_rows(self) -> None:
        """Notes the rows that others laid since the last token: they count as prompt."""
        laid = len(self._sequence.timeline)
        if self._options.drawing.penalised:
            self._history.read(self._sequence.timeline.ids(self._read, laid))
        self._read = laid

    def add(self, token: int) -> None:
        """Lays the token that was drawn, and tells it."""
        assert isinstance(token, Drawn), "the sampler draws it"
        timeline = self._sequence.timeline
        if not self._drawn:
            self._first = time.monotonic()
            self._begin()
        self._tell_visible()
        self._sequence.extend([[token]])
        self._read += 1
        if self._options.drawing.penalised:
            self._history.add(token)
        if self._guide is not None:
            self._guide.accept(token)
        self._drawn += 1
        text = self._detokenizer.push(self._control.get(token) or self._model.token_bytes(token))
        told = self._stops.push(text, may_end=self._may_end)
        self._tell(
            tokens=pb.Tokens(
                attempt=self._open.attempt,
                index=self._drawn - 1,
                ids=[token],
                text=told.encode("utf-8"),
                logprobs=_told_logprobs(token),
            )
        )
        if self._live and token == self._model.silence_id:
            self._silent = True
            self._tell(silence=pb.Silence(attempt=self._open.attempt, index=self._drawn - 1))
        guided_out = self._guide is not None and self._guide.ended
        if self._stops.found is not None or token in self._stop_ids or guided_out:
            self._finish(pb.FINISH_REASON_STOP)
        elif self._drawn == self._limit or timeline.counter >= self._model.context_limit:
            self._finish(pb.FINISH_REASON_LENGTH)

    @property
    def _may_end(self) -> bool:
        """The answer may end by itself with the last token: there were `min_tokens` before it."""
        return self._drawn > self._options.min_tokens

    def responses(self) -> list[dpb.DecodeResponse]:
        """What there is to tell since the last time."""
        out, self._out = self._out, []
        return out

    def _tell(self, **message: object) -> None:
        self._out.append(dpb.DecodeResponse(**message))  # type: ignore[arg-type]

    def _begin(self) -> None:
        timeline = self._sequence.timeline
        self._prompt_rows = len(timeline)  # a medium that ended early has left fewer than were admitted
        frames = [self._frame(unit) for unit in timeline.units]
        visible = timeline.visible().tolist() if self._open.prompt_visibility else []
        self._tell(
            started=pb.Started(
                attempt=self._open.attempt,
                frames=frames,
                prompt_tokens=self._prompt_rows,
                prompt_visible=visible[: self._prompt_rows],
            )
        )

    def _frame(self, unit: LaidUnit) -> pb.TimelineFrame:
        sized = self._sequence.sized(unit.name.slot)
        assert sized is not None, "a laid unit was sized"
        rows, columns = sized.grids[unit.name.unit]
        return pb.TimelineFrame(
            slot=unit.name.slot,
            index=unit.name.unit,
            unit=unit.name.unit,
            frame_offset=self._offset(unit),
            grid=pb.Grid(t=1, h=rows, w=columns),
            tokens=unit.layout.vision_tokens,
            at_index=unit.index,
        )

    def _tell_visible(self) -> None:
        timeline = self._sequence.timeline
        seen = (timeline.dropped, len(timeline.units))
        if seen == self._seen:
            return
        self._seen = seen
        last = timeline.units[-1] if seen[1] > seen[0] else None
        self._tell(
            visible=pb.Visible(
                attempt=self._open.attempt,
                index=self._drawn,
                first=seen[0],
                count=seen[1],
                last=None if last is None else pb.UnitRef(slot=last.name.slot, unit=last.name.unit),
                visible_until_offset=None if last is None else self._offset(last),
            )
        )

    def _offset(self, unit: LaidUnit) -> Duration | None:
        """When a unit is shown in its medium; None for an image, which has no time."""
        kinds = {slot.slot: slot.kind for slot in self._open.slots}
        sized = self._sequence.sized(unit.name.slot)
        if sized is None or kinds.get(unit.name.slot) == pb.MEDIA_KIND_IMAGE:
            return None
        return to_duration(sized.offsets[unit.name.unit])

    def _finish(self, reason: pb.FinishReason.ValueType) -> None:
        self.finished = True
        timeline = self._sequence.timeline
        usage = pb.Usage(
            prompt_tokens=self._prompt_rows,
            visual_tokens=timeline.vision_tokens,
            cached_prompt_tokens=min(self._sequence.spared, self._prompt_rows),
            output_tokens=self._drawn,
        )
        now = time.monotonic()
        first = self._first or now
        times = pb.StageTimes(
            queue=to_duration(self._queued),
            prefill=to_duration(first - (self._begun or first)),
            decode=to_duration(now - first),
        )
        text = self._stops.finish(self._detokenizer.finish(), may_end=self._may_end)
        if self._stops.found is not None and reason == pb.FINISH_REASON_LENGTH:
            reason = pb.FINISH_REASON_STOP
        self._tell(
            finished=pb.Finished(
                attempt=self._open.attempt,
                reason=reason,
                stop=self._stops.found or "",
                text=text.encode("utf-8"),
                tokens=self._drawn,
                usage=usage,
                times=times,
            )
        )


def _ids(ids: Iterable[int]) -> Ids:
    return np.array(sorted(ids), dtype=np.int64)


def _control_bytes(model: DecoderModel) -> dict[int, bytes]:
    """The names of control tokens, by id. Raises Unsupported for a family that tells none."""
    if not isinstance(model.prompt, NamesControl):
        name = "skip_special_tokens"
        raise Unsupported("FEATURE_DISABLED", f"sampling.{name} is not served by this model", facts={"field": name})
    return {token: name.encode() for name, token in model.prompt.control.items()}


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
