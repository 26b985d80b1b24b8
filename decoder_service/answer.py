"""The answer of one sequence: what the caller is told of the tokens that were drawn, and when it ends.

It is a step or more behind what is drawn: what comes after its end is not told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from google.protobuf.duration_pb2 import Duration

from chiasm.errors import Unsupported
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.timeline import LaidUnit
from decoder_service.drawer import Drawer
from decoder_service.model import DecoderModel
from decoder_service.options import Options
from decoder_service.reply import Reply
from decoder_service.sampler import Drawn
from decoder_service.seats import Outcome
from decoder_service.sequence import DecodeSequence
from decoder_service.wording import Wording


class Answer(Reply):
    """Tokens drawn for one sequence.

    Args:
        number: of the sequence among those of its request.
        emitted: its first tokens, where an earlier attempt has told them.
    """

    drawer: Drawer

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
        super().__init__(opened, sequence, number=number)
        sequence.coming = max(len(emitted), 1)
        self._model = model
        self._options = options
        self._emitted = emitted  # that is not laid yet
        self._live = opened.sample == dpb.SAMPLE_MODE_WHILE_OPEN
        own: frozenset[int] = frozenset() if options.ignore_eos or self._live else model.prompt.stop_ids
        self._stop_ids = own | options.stop_ids
        silence = {model.silence_id} if self._live and model.silence_id is not None else frozenset()
        self.stops = self._stop_ids | silence
        self.drawer = Drawer(
            sequence,
            options,
            number=number,
            banned=model.prompt.banned_ids | options.banned_ids,
            stops=self._stop_ids,
        )
        self._wording = Wording(model, options, self._stop_ids)
        self._seen: tuple[int, int] | None = None  # (first, count) of units, as the caller was last told
        self._silent = False

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
    def resumes(self) -> bool:
        return bool(self._emitted)

    @property
    def room(self) -> int:
        """Tokens that may be drawn behind those that were told."""
        return min(self._wording.limit - self.told, self._model.context_limit - self._sequence.timeline.counter)

    def admit(self, room: int, *, queued: float) -> None:
        super().admit(room, queued=queued)
        self._wording.limit = room

    def heard(self) -> None:
        """Something was appended: silence is over."""
        self._silent = False

    def close(self) -> None:
        super().close()
        if self._live:
            self._finish(pb.FINISH_REASON_CLOSED)

    def tell(self, outcomes: Sequence[Outcome]) -> None:
        for token in outcomes:
            assert isinstance(token, Drawn), "the sampler draws it"
            if self.finished:
                return
            if not self._first:
                self._came()
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

    def _finish(self, reason: pb.FinishReason.ValueType) -> None:
        text, found = self._wording.finish()
        if found is not None and reason == pb.FINISH_REASON_LENGTH:
            reason = pb.FINISH_REASON_STOP
        self._end(reason, stop=found or "", text=text.encode("utf-8"))


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
