"""The answer of one timeline: when a token may be drawn, what the caller is told of it, and when it ends.

It draws and counts. It knows nothing of entries, pools and steps.
"""

from __future__ import annotations

import time

from google.protobuf.duration_pb2 import Duration
from torch import Tensor

from chiasm.rpc.times import to_duration
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.timeline import LaidUnit
from decoder_service import convert
from decoder_service.detokenizer import Detokenizer
from decoder_service.model import DecoderModel
from decoder_service.sampler import draw
from decoder_service.sequence import DecodeSequence


class Answer:
    """Tokens drawn for one sequence."""

    def __init__(self, model: DecoderModel, opened: dpb.DecodeOpen, sequence: DecodeSequence) -> None:
        self._model = model
        self._open = opened
        self._sequence = sequence
        self._live = opened.sample == dpb.SAMPLE_MODE_WHILE_OPEN
        self._options = convert.read_options(opened.sampling, opened.seed, model.vocabulary)
        own = frozenset() if self._options.ignore_eos or self._live else model.prompt.stop_ids
        self._stop_ids = own | self._options.stop_ids
        self._banned = sorted(model.prompt.banned_ids | self._options.banned_ids)
        self._detokenizer = Detokenizer()
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

    def draw(self, logits_v: Tensor) -> int:
        """The next token, from the (vocabulary,) logits of the last row. Changes nothing, so that any thread may draw
        while nobody else does anything with this answer.

        Raises ServerError NONFINITE for logits that no token can be drawn from.
        """
        return draw(logits_v, self._options.drawing, index=self._drawn, banned=self._banned)

    def add(self, token: int) -> None:
        """Lays the token that was drawn, and tells it."""
        timeline = self._sequence.timeline
        if not self._drawn:
            self._first = time.monotonic()
            self._begin()
        self._tell_visible()
        self._sequence.extend([[token]])
        text = self._detokenizer.push(self._model.token_bytes(token))
        self._tell(
            tokens=pb.Tokens(attempt=self._open.attempt, index=self._drawn, ids=[token], text=text.encode("utf-8"))
        )
        self._drawn += 1
        if self._live and token == self._model.silence_id:
            self._silent = True
            self._tell(silence=pb.Silence(attempt=self._open.attempt, index=self._drawn - 1))
        if token in self._stop_ids:
            self._finish(pb.FINISH_REASON_STOP)
        elif self._drawn == self._limit or timeline.counter >= self._model.context_limit:
            self._finish(pb.FINISH_REASON_LENGTH)

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
            prompt_tokens=self._prompt_rows, visual_tokens=timeline.vision_tokens, output_tokens=self._drawn
        )
        now = time.monotonic()
        first = self._first or now
        times = pb.StageTimes(
            queue=to_duration(self._queued),
            prefill=to_duration(first - (self._begun or first)),
            decode=to_duration(now - first),
        )
        text = self._detokenizer.finish()
        self._tell(
            finished=pb.Finished(
                attempt=self._open.attempt,
                reason=reason,
                text=text.encode("utf-8"),
                tokens=self._drawn,
                usage=usage,
                times=times,
            )
        )
