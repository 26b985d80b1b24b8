"""The reply of a timeline that samples nothing: it begins and ends with one outcome, behind the last row laid."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from chiasm.rpc.v1 import decoder_pb2 as dpb
from decoder_service.reply import Reply
from decoder_service.seats import Outcome
from decoder_service.sequence import DecodeSequence


class Unsampled(Reply):
    """Of one sequence."""

    def __init__(self, opened: dpb.DecodeOpen, sequence: DecodeSequence) -> None:
        super().__init__(opened, sequence)
        sequence.coming = 0

    @abstractmethod
    def _tell_outcome(self, outcome: Outcome) -> None:
        """Tells what the steps have come to, and its end, unless there is more to do before that."""

    @property
    def may_draw(self) -> bool:
        return self._closed and not self.finished

    @property
    def room(self) -> int:
        return 1  # the outcome

    @property
    def told(self) -> int:
        return 0

    @property
    def resumes(self) -> bool:
        return False  # what was told elsewhere is told anew

    async def resume(self) -> None:
        """Nothing."""

    async def read_guide(self) -> None:
        """There is none."""

    def heard(self) -> None:
        """It listens to nobody."""

    def tell(self, outcomes: Sequence[Outcome]) -> None:
        (outcome,) = outcomes
        self._came()
        self._begin(len(self._sequence.timeline))
        self._spared = min(self._sequence.spared, self._prompt_rows)
        self._tell_outcome(outcome)
