"""What a caller is told of one sequence, whatever it asked for: where its answer begins and ends, and what it used.

What is told in between is for those who stand on it: tokens (`answer`), or states (`pooled`). It knows nothing of
entries, pools and steps.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

from google.protobuf.duration_pb2 import Duration

from chiasm.rpc.times import to_duration
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.timeline import LaidUnit
from decoder_service.drawer import Drawer
from decoder_service.prefix import prompt_digest
from decoder_service.seats import Outcome
from decoder_service.sequence import DecodeSequence
from decoder_service.states import Gathering


class Reply(ABC):
    """Of one sequence.

    Args:
        number: of the sequence among those of its request.

    Attributes:
        drawer: draws its tokens; None for one of which none are drawn.
        gathering: takes the states of all its rows; None for one of which they are not asked for.
        stops: tokens behind which nothing is drawn before something is appended.
        finished: all was told.
    """

    def __init__(self, opened: dpb.DecodeOpen, sequence: DecodeSequence, *, number: int = 0) -> None:
        self.drawer: Drawer | None = None
        self.gathering: Gathering | None = None
        self.stops: frozenset[int] = frozenset()
        self.finished = False
        self._open = opened
        self._sequence = sequence
        self._number = number
        self._out: list[dpb.DecodeResponse] = []
        self._prompt_rows = 0
        self._spared = 0  # of those, when its first outcome came
        self._closed = False
        self._queued = 0.0  # seconds
        self._begun = 0.0  # when it was admitted and when its first outcome came, by the monotonic clock
        self._first = 0.0
        self._ended = 0.0

    @property
    @abstractmethod
    def may_draw(self) -> bool:
        """Something may be made of the last row laid, as far as this is concerned."""

    @property
    @abstractmethod
    def room(self) -> int:
        """Outcomes that may come behind those that were told."""

    @abstractmethod
    def tell(self, outcomes: Sequence[Outcome]) -> None:
        """Tells what the steps have come to, as far as it goes. The timeline may have the next one already."""

    @abstractmethod
    async def read_guide(self) -> None:
        """Compiles what it must keep to, if there is anything. Comes before the first outcome."""

    @property
    @abstractmethod
    def resumes(self) -> bool:
        """What an earlier attempt has told of it is still to be laid."""

    @abstractmethod
    async def resume(self) -> None:
        """Lays that behind the prompt, which is whole."""

    @property
    @abstractmethod
    def told(self) -> int:
        """Tokens so far."""

    @property
    def begun(self) -> bool:
        """There was a first outcome here, or none will come."""
        return self._first > 0 or self.finished

    def admit(self, room: int, *, queued: float) -> None:
        """There is room for so many tokens; it was waited for `queued` seconds."""
        self._prompt_rows = len(self._sequence.timeline)
        self._queued = queued
        self._begun = time.monotonic()

    @abstractmethod
    def heard(self) -> None:
        """Something was appended."""

    def close(self) -> None:
        """Nothing more will be laid by its caller."""
        self._closed = True

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

    def _offset(self, slot: int, seconds: float) -> Duration | None:
        """When a frame is shown in its medium; None for an image, which has no time."""
        kinds = {one.slot: one.kind for one in self._open.slots}
        return None if kinds.get(slot) == pb.MEDIA_KIND_IMAGE else to_duration(seconds)

    def _came(self) -> None:
        """The first outcome is here."""
        self._first = time.monotonic()

    def _end(self, reason: pb.FinishReason.ValueType, *, stop: str = "", text: bytes = b"") -> None:
        self.finished = True
        self._ended = time.monotonic()
        self._tell(
            finished=pb.Finished(
                sequence=self._number,
                attempt=self._open.attempt,
                reason=reason,
                stop=stop,
                text=text,
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
