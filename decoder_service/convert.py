"""The wire's words about timelines to ours. What this release does not do is refused by name, never passed over."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from chiasm.chat_template import Piece, Slot, Turn
from chiasm.errors import InvalidRequest, Unsupported
from chiasm.models.family import Grid, Prompt, WrittenMedium
from chiasm.rpc.limits import TEXT_BYTES
from chiasm.rpc.times import to_seconds
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.timeline import UnitLayout
from decoder_service.laid import SizedSlot
from decoder_service.packed import PackedPieces

_ROLES = {pb.ROLE_SYSTEM: "system", pb.ROLE_USER: "user", pb.ROLE_ASSISTANT: "assistant", pb.ROLE_TOOL: "tool"}


class ReadPrompt(NamedTuple):
    """A prompt in our words.

    Attributes:
        pieces: runs of token ids, and slots, in order.
        written: media whose tokens the caller wrote itself, by slot.
    """

    pieces: list[Piece]
    written: dict[int, WrittenMedium]


def read_prompt(
    prompt: pb.Prompt, family: Prompt, vocabulary: int, kinds: Mapping[int, pb.MediaKind.ValueType]
) -> ReadPrompt:
    """Reads and tokenises a prompt. It may take seconds (`text_bytes`).

    Args:
        kinds: of its slots.

    Raises InvalidRequest for a prompt that is none, an empty one, and ids that are no tokens of this model or stand for
    a medium without leave.
    """
    written: dict[int, WrittenMedium] = {}
    pieces = _read_pieces(prompt, family, vocabulary, kinds, written)
    if not any(isinstance(piece, Slot) or piece for piece in pieces):
        raise InvalidRequest("EMPTY_PROMPT", "there is neither text nor a medium")
    # A list takes up to ten times as much, and they are kept as long as the request.
    return ReadPrompt([piece if isinstance(piece, Slot) else array("i", piece) for piece in pieces], written)


def beside_prompt(opened: dpb.DecodeOpen) -> dpb.DecodeOpen:
    """What is still looked at when the prompt was read and sampling is known, without the memory of the rest."""
    return dpb.DecodeOpen(
        attempt=opened.attempt,
        tenant_root=opened.tenant_root,
        slots=opened.slots,
        sample=opened.sample,
        prompt_visibility=opened.prompt_visibility,
        priority=opened.priority,
        fairness_key=opened.fairness_key,
    )


def text_bytes(prompt: pb.Prompt) -> int:
    """Bytes of text in a prompt. Raises InvalidRequest TEXT_TOO_LARGE for more than may be tokenised."""
    turns = prompt.conversation.turns
    parts = [*prompt.plain.parts, *(part for turn in turns for part in turn.parts)]
    return bounded_bytes("".join(part.text for part in parts))


def bounded_bytes(text: str) -> int:
    """Bytes of a text. Raises InvalidRequest TEXT_TOO_LARGE for more than may be tokenised."""
    size = len(text.encode())
    if size > TEXT_BYTES:
        raise InvalidRequest(
            "TEXT_TOO_LARGE",
            f"the prompt has {size} bytes of text, {TEXT_BYTES} are allowed",
            facts={"bytes": size, "limit": TEXT_BYTES, "cause": "size"},
        )
    return size


def _read_pieces(
    prompt: pb.Prompt,
    family: Prompt,
    vocabulary: int,
    kinds: Mapping[int, pb.MediaKind.ValueType],
    written: dict[int, WrittenMedium],
) -> list[Piece]:
    which = prompt.WhichOneof("form")
    if which == "conversation":
        if prompt.conversation.continue_last:
            raise Unsupported("FEATURE_DISABLED", "continue_last is not served", facts={"field": "continue_last"})
        turns = [read_turn(turn, f"messages[{i}]") for i, turn in enumerate(prompt.conversation.turns)]
        if not turns:
            raise InvalidRequest("EMPTY_PROMPT", "the conversation has no turns")
        return family.turns([_with_openings(turn, family, kinds) for turn in turns])
    if which == "plain":
        return _plain_pieces(prompt.plain.parts, family, vocabulary, kinds, written)
    raise InvalidRequest("FIELD_MISSING", "the prompt is missing", facts={"field": "prompt"})


def read_turn(turn: pb.Turn, item: str) -> Turn:
    if turn.role not in _ROLES:
        raise InvalidRequest.out_of_range("role", turn.role, "one that is known", item)
    parts: list[str | Slot] = []
    for part in turn.parts:
        which = part.WhichOneof("content")
        if which == "text":
            parts.append(part.text)
        elif which == "slot":
            parts.append(Slot(part.slot))
        elif which == "tokens":
            raise Unsupported(
                "FEATURE_DISABLED", "tokens inside a turn are not served, only in a plain prompt", item=item
            )
        else:
            raise InvalidRequest("FIELD_MISSING", "a part is empty", item=item)
    return Turn(_ROLES[turn.role], tuple(parts))


def opening_of(kind: pb.MediaKind.ValueType | None, family: Prompt) -> str:
    """The text with which what is laid in a slot begins (`Prompt.opening`). A frame of a timeline has none."""
    if kind == pb.MEDIA_KIND_VIDEO:
        return family.opening("video")
    return family.opening("image") if kind == pb.MEDIA_KIND_IMAGE else ""


def _with_openings(turn: Turn, family: Prompt, kinds: Mapping[int, pb.MediaKind.ValueType]) -> Turn:
    """The turn with the openings of its media as text of its own."""
    parts: list[str | Slot] = []
    for part in turn.parts:
        if isinstance(part, Slot) and (opening := opening_of(kinds.get(part.index), family)):
            parts.append(opening)
        parts.append(part)
    return Turn(turn.role, tuple(parts))


def _plain_pieces(
    parts: Sequence[pb.Part],
    family: Prompt,
    vocabulary: int,
    kinds: Mapping[int, pb.MediaKind.ValueType],
    written: dict[int, WrittenMedium],
) -> list[Piece]:
    """The pieces of a plain prompt. Media that the caller wrote as pads take the next slots, and go into `written`."""
    openings = [opening_of(kinds.get(part.slot), family) if part.HasField("slot") else "" for part in parts]
    pieces: list[Piece] = []
    slots = 0
    for i, part in enumerate(parts):
        which = part.WhichOneof("content")
        if which == "text":
            pieces.append(family.text(part.text + "".join(openings[i + 1 : i + 2])))
        elif which == "slot":
            if openings[i] and not (i and parts[i - 1].HasField("text")):
                pieces.append(family.text(openings[i]))
            pieces.append(Slot(part.slot))
            slots += 1
        elif which == "tokens":
            for piece in _token_pieces(part.tokens, family, vocabulary, f"parts[{i}]"):
                if isinstance(piece, WrittenMedium):
                    written[slots] = piece
                    pieces.append(Slot(slots))
                    slots += 1
                else:
                    pieces.append(piece)
        else:
            raise InvalidRequest("FIELD_MISSING", "a part is empty", item=f"parts[{i}]")
    return pieces


def _token_pieces(run: pb.TokenRun, family: Prompt, vocabulary: int, item: str) -> Sequence[list[int] | WrittenMedium]:
    for i, token in enumerate(run.ids):
        if token >= vocabulary:
            raise InvalidRequest.out_of_range(f"{item}.ids[{i}]", token, f"0 to {vocabulary - 1}")
        if token in family.banned_ids and not run.pads_bind_slots:
            raise InvalidRequest(
                "PLACEHOLDER_MISMATCH",
                f"token {token} stands for a medium: name a slot, or let pads bind slots",
                item=item,
                facts={"index": i},
            )
    if not run.pads_bind_slots:
        return [list(run.ids)]
    try:
        return family.written(list(run.ids))
    except InvalidRequest as error:
        raise error.at(item) from None


def sized_slot(
    sized: dpb.DecodeSized,
    kind: pb.MediaKind.ValueType,
    family: Prompt,
    unit_layout: Callable[[Grid], UnitLayout],
    written: WrittenMedium | None = None,
) -> SizedSlot:
    """The units of a slot with the text around them: the family's, or what the caller wrote itself.

    Args:
        unit_layout: how the family lays a unit of a grid.

    Raises InvalidRequest for a slot without any units, and where another number of them is laid, or of the placeholders
    of any of them.
    """
    if not sized.units:
        raise InvalidRequest("NO_FRAMES", "a medium has no units")
    span = max(len(unit.frames) for unit in sized.units)
    if any(len(unit.frames) != span for unit in sized.units[:-1]) or not sized.units[-1].frames:
        raise InvalidRequest("UPLOAD_PROTOCOL", "units but the last are of unlike numbers of frames, or one is of none")
    offsets = array("d", (to_seconds(frame.frame_offset) for unit in sized.units for frame in unit.frames))
    grids = _grids(sized.units)
    slot = SizedSlot((), grids, offsets, sized.final, span)
    times = [slot.time_of(unit) for unit in range(len(grids))]
    if written is not None:
        pieces = written.pieces
    elif kind == pb.MEDIA_KIND_FRAME:
        before, after = family.frame(times[0])
        pieces = [before, 0, after]
    else:
        pieces = family.medium("video" if kind == pb.MEDIA_KIND_VIDEO else "image", times)
    laid = [piece for piece in pieces if isinstance(piece, int)]
    if laid != list(range(len(sized.units))):
        raise InvalidRequest(
            "PLACEHOLDER_MISMATCH",
            f"{len(sized.units)} units came where {len(laid)} are laid",
            facts={"placeholders": len(laid), "media": len(sized.units)},
        )
    for unit, pads in enumerate(() if written is None else written.pads):
        tokens = len(unit_layout(grids[unit]).placeholder_ids)
        if pads != tokens:
            raise InvalidRequest(
                "PLACEHOLDER_MISMATCH",
                f"{pads} placeholders are written for unit {unit}, which has {tokens}",
                facts={"placeholders": pads, "tokens": tokens},
            )
    return replace(slot, pieces=PackedPieces(pieces))


def _grids(units: Iterable[pb.Unit]) -> list[Grid]:
    """Of each. A video's are mostly equal: one object serves them all."""
    same: dict[Grid, Grid] = {}
    return [same.setdefault(grid, grid) for grid in ((unit.grid.h, unit.grid.w) for unit in units)]


def check_slots(pieces: Iterable[Piece], slots: Sequence[dpb.Slot]) -> None:
    """Every slot that is named is used, once and in order; otherwise PLACEHOLDER_MISMATCH with both counts."""
    used = [piece.index for piece in pieces if isinstance(piece, Slot)]
    named = [slot.slot for slot in slots]
    if used != named:
        raise InvalidRequest(
            "PLACEHOLDER_MISMATCH",
            f"the prompt places {len(used)} media, {len(named)} came with it",
            facts={"placeholders": len(used), "media": len(named)},
        )
