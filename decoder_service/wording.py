"""What the tokens of one answer come to: their text, as far as it is certain, and where the answer ends.

Tokens that were drawn here and tokens that an earlier attempt has told go the same way through it. It knows no wire, no
step, and nothing of where tokens are laid beyond the position of each.
"""

from __future__ import annotations

from collections.abc import Sequence

from chiasm.errors import Unsupported
from chiasm.rpc.v1 import common_pb2 as pb
from decoder_service.detokenizer import Detokenizer, NamesControl
from decoder_service.emitted import goes_on
from decoder_service.guide import Guide
from decoder_service.model import DecoderModel
from decoder_service.options import Options
from decoder_service.stops import StopStrings


class Wording:
    """Text and end of one answer.

    Args:
        stop_ids: tokens that end it.

    Attributes:
        count: tokens so far.
        limit: of them at most, once it is known.
    """

    def __init__(self, model: DecoderModel, options: Options, stop_ids: frozenset[int]) -> None:
        self.count = 0
        self.limit = 0
        self._model = model
        self._min_tokens = options.min_tokens
        self._stop_ids = stop_ids
        self._control = {} if options.skip_special_tokens else _control_bytes(model)
        self._detokenizer = Detokenizer()
        self._strings = StopStrings(options.stop)

    def push(self, token: int) -> str:
        """Takes the next token. Returns the text that is certain with it."""
        self.count += 1
        text = self._detokenizer.push(self._control.get(token) or self._model.token_bytes(token))
        return self._strings.push(text, may_end=self._may_end)

    def end(self, token: int, position: int, *, last: bool) -> pb.FinishReason.ValueType | None:
        """How the answer ends with the token that was pushed just now; None if it does not.

        Args:
            last: it is one behind which nothing may come.
        """
        if self._strings.found is not None or token in self._stop_ids or last:
            return pb.FINISH_REASON_STOP
        if self.count == self.limit or position + 1 >= self._model.context_limit:
            return pb.FINISH_REASON_LENGTH
        return None

    def finish(self) -> tuple[str, str | None]:
        """The rest of the text, and the stop string that was found, if there was one."""
        text = self._strings.finish(self._detokenizer.finish(), may_end=self._may_end)
        return text, self._strings.found

    def replay(
        self, ids: Sequence[int], position: int, guide: Guide | None, *, number: int
    ) -> pb.FinishReason.ValueType | None:
        """Takes the first tokens of sequence `number` once more. Returns how it ends with the last of them, as `end`.

        Args:
            position: of the first.
            guide: what they must keep to; it goes on with them.

        Raises InvalidRequest FIELD_OUT_OF_RANGE for tokens that go on behind the end of the answer, ServerError
        NOT_RESUMABLE for those that the guide does not allow.
        """
        if guide is not None:
            guide.replay(ids)
        reason = None
        for at, token in enumerate(ids):
            if reason is not None:
                raise goes_on(number, len(ids), at, "behind which the answer ends")
            self.push(token)
            last = guide is not None and guide.ended and at + 1 == len(ids)
            reason = self.end(token, position + at, last=last)
        return reason

    @property
    def _may_end(self) -> bool:
        """The answer may end by itself with the last token: there were `min_tokens` before it."""
        return self.count > self._min_tokens


def _control_bytes(model: DecoderModel) -> dict[int, bytes]:
    """The names of control tokens, by id. Raises Unsupported for a family that tells none."""
    if not isinstance(model.prompt, NamesControl):
        name = "skip_special_tokens"
        raise Unsupported("FEATURE_DISABLED", f"sampling.{name} is not served by this model", facts={"field": name})
    return {token: name.encode() for name, token in model.prompt.control.items()}
