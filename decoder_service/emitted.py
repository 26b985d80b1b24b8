"""Tokens of an answer that an earlier attempt emitted, as the caller says them again: read, and held against what the
call could have drawn at all. What they come to is for `answer` to say.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from chiasm.errors import InvalidRequest, Unsupported
from chiasm.rpc.v1 import decoder_pb2 as dpb
from decoder_service.model import DecoderModel
from decoder_service.options import Options


def read_emitted(opened: dpb.DecodeOpen, options: Options, model: DecoderModel) -> dict[int, Sequence[int]]:
    """The ids of each sequence that had begun, by its number.

    Raises Unsupported FEATURE_DISABLED for a call that gives no answer to a closed timeline, InvalidRequest
    FIELD_OUT_OF_RANGE for a sequence that there is none of or that is told twice, and for an id that is none of the
    vocabulary or is never drawn.
    """
    if opened.emitted and opened.sample != dpb.SAMPLE_MODE_WHEN_CLOSED:
        message = "emitted is served for timelines that are closed before they are answered"
        raise Unsupported("FEATURE_DISABLED", message, facts={"field": "emitted"})
    banned = model.prompt.banned_ids | options.banned_ids
    read: dict[int, Sequence[int]] = {}
    seen: set[int] = set()
    for i, emitted in enumerate(opened.emitted):
        if emitted.sequence >= options.n or emitted.sequence in seen:
            item = f"emitted[{i}].sequence"
            raise InvalidRequest.out_of_range(item, emitted.sequence, f"0 to {options.n - 1}, each once", item)
        seen.add(emitted.sequence)
        for at, token in enumerate(emitted.ids):
            if token >= model.vocabulary or token in banned:
                item = f"emitted[{i}].ids[{at}]"
                raise InvalidRequest.out_of_range(item, token, f"0 to {model.vocabulary - 1} and not banned", item)
        if emitted.ids:
            read[emitted.sequence] = array("i", emitted.ids)
    return read


def goes_on(sequence: int, count: int, most: int, why: str) -> InvalidRequest:
    """FIELD_OUT_OF_RANGE of a sequence of `count` tokens of which there can be `most`.

    Args:
        why: goes on from that number.
    """
    return InvalidRequest.out_of_range(
        f"the count of emitted tokens of sequence {sequence}", count, f"at most {most}, {why}", "emitted"
    )
