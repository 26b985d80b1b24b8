"""What is laid behind the prompt of a timeline that grows: turns, frames, drops, in the order of their numbers.

It knows no entry, no room and no token that is drawn.
"""

from __future__ import annotations

from chiasm.chat_template import Piece, Slot
from chiasm.errors import InvalidRequest, Unsupported
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from decoder_service import convert
from decoder_service.fitting import check_text
from decoder_service.laid import Drop
from decoder_service.model import DecoderModel
from decoder_service.sequence import DecodeSequence


class Growth:
    """Events of one timeline. Used while nothing is computed of it.

    Args:
        kinds, items: of its slots; those that are named here are added.
    """

    def __init__(
        self,
        model: DecoderModel,
        sequence: DecodeSequence,
        kinds: dict[int, pb.MediaKind.ValueType],
        items: dict[int, str],
    ) -> None:
        self._model = model
        self._sequence = sequence
        self._kinds = kinds
        self._items = items
        self._laying: dict[int, int] = {}  # events that are not laid yet, and their pieces
        self._event = 0  # the last one that came

    async def append(self, append: dpb.DecodeAppend) -> None:
        """Raises InvalidRequest for one out of order or that is no user's text and no frame."""
        if append.HasField("at_index"):
            raise broken_order("at_index is for timelines that are resumed")
        for slot in append.slots:
            if slot.slot in self._kinds:
                raise broken_order(f"slot {slot.slot} is named already")
            self._kinds[slot.slot], self._items[slot.slot] = slot.kind, slot.item
        which = append.WhichOneof("content")
        if which == "turn":
            turn = convert.read_turn(append.turn, f"append[{append.event}]")
            text = "".join(part for part in turn.parts if isinstance(part, str))
            if turn.role != "user" or len(turn.parts) != 1 or not text:
                raise InvalidRequest("MESSAGE_ORDER", "a live timeline takes user turns of text")
            ids = await self._model.tokenise(convert.bounded_bytes(text), self._model.prompt.spliced, text)
            check_text([ids], self._model.context_limit)
            self._lay(append.event, ids)
        elif which == "slot" and [slot.slot for slot in append.slots] == [append.slot]:
            opening = self._model.prompt.text(convert.opening_of(self._kinds[append.slot], self._model.prompt))
            self._lay(append.event, *([opening] if opening else []), Slot(append.slot))
        else:
            raise InvalidRequest("PLACEHOLDER_MISMATCH", "what is appended names no turn and no slot of its own")

    def drop(self, drop: dpb.DecodeDrop) -> None:
        """Raises InvalidRequest UPLOAD_PROTOCOL for one out of order, or that hides what is not laid, Unsupported where
        units are part of the text: what is behind them was computed from them."""
        if self._model.engine.half.entry_shape.overlaid:
            raise Unsupported("FEATURE_DISABLED", "this model cannot forget frames", facts={"field": "drop"})
        self._lay(drop.event, Drop(drop.first_visible))

    def _lay(self, event: int, *pieces: Piece | Drop) -> None:
        if event <= self._event:
            raise broken_order(f"event {event} came after event {self._event}")
        self._event = event
        try:
            self._laying[event] = self._sequence.extend(pieces)
        except ValueError as error:
            raise broken_order(str(error)) from None

    def laid(self) -> list[dpb.DecodeResponse]:
        """Answers to events that have a place by now which cannot move any more."""
        places = {event: self._sequence.row_of(piece) for event, piece in self._laying.items()}
        settled = {event: row for event, row in places.items() if row is not None}
        for event in settled:
            del self._laying[event]
        return [dpb.DecodeResponse(laid=pb.Laid(event=event, at_index=row)) for event, row in settled.items()]


def broken_order(message: str) -> InvalidRequest:
    """A caller that does not keep to the order of messages."""
    return InvalidRequest("UPLOAD_PROTOCOL", message)
