"""How MOSS-VL writes a conversation: ChatML, a pad token for an image, time-stamped pads for a video. No torch.

An image is its pad alone. A video is `<|vision_start|>`, per frame `<|time_start|>`1.2 seconds`<|time_end|>` and the
pad, then `<|vision_end|>`. A frame of a growing timeline is a region of its own. (The model's published processor.)
"""

from __future__ import annotations

from collections.abc import Sequence

from chiasm.chat_template import ChatTemplate, Piece, Turn
from chiasm.errors import CheckpointError, InvalidRequest
from chiasm.media.types import Kind
from chiasm.models.family import WrittenMedium
from chiasm.models.moss_vl.config import Config
from chiasm.tokenizer import Tokenizer

_TIME = ("<|time_start|>", "<|time_end|>")
_TURN = ("<|im_start|>", "<|im_end|>")
SILENCE = "<|silence|>"
RESPONSE = "<|response|>"


class MossVLPrompt:
    """`Prompt` of one checkpoint.

    Raises CheckpointError listing every control token that the tokenizer lacks or numbers otherwise than config.json.
    """

    def __init__(self, config: Config, tokenizer: Tokenizer, template: str | None) -> None:
        problems = [f"has no {name}" for name in (*_TIME, *_TURN) if name not in tokenizer.control]
        for name, token in (
            ("<|image_pad|>", config.image_token_id),
            ("<|video_pad|>", config.video_token_id),
            ("<|vision_start|>", config.vision_start_token_id),
            ("<|vision_end|>", config.vision_end_token_id),
        ):
            if tokenizer.control.get(name) != token:
                problems.append(f"numbers {name} {tokenizer.control.get(name)}, config.json {token}")
        if tokenizer.vocab_size > config.text.vocab_size:
            problems.append(f"has {tokenizer.vocab_size} ids, config.json {config.text.vocab_size}")
        if problems:
            raise CheckpointError("tokenizer.json", problems)
        self._config = config
        self.text = tokenizer.encode
        self.token_bytes = tokenizer.token_bytes
        self.control = tokenizer.control
        self._template = ChatTemplate(tokenizer, template)
        self._time = [tokenizer.control[name] for name in _TIME]
        self._turn = [tokenizer.control[name] for name in _TURN]
        self.silence_id = tokenizer.control.get(SILENCE)
        self.response_id = tokenizer.control.get(RESPONSE)

    @property
    def stop_ids(self) -> frozenset[int]:
        return frozenset({self._turn[1]})

    @property
    def banned_ids(self) -> frozenset[int]:
        return frozenset({self._config.image_token_id, self._config.video_token_id})

    def turns(self, turns: Sequence[Turn]) -> list[Piece]:
        return self._template.render(turns)

    def opening(self, kind: Kind) -> str:
        """None: a control token ends the text before a medium."""
        return ""

    def medium(self, kind: Kind, offsets: Sequence[float]) -> list[list[int] | int]:
        if kind == "image":
            return [0]
        pieces: list[list[int] | int] = []
        before = [self._config.vision_start_token_id]
        for number, offset in enumerate(offsets):
            pieces += [before + self._stamp(offset), number]
            before = []
        return [*pieces, [self._config.vision_end_token_id]]

    def written(self, ids: Sequence[int]) -> list[list[int] | WrittenMedium]:
        """A pad by itself is a medium of one unit. From `<|vision_start|>` to `<|vision_end|>` the pads are the units
        of one medium, and what stands between them stays as the caller wrote it, the times above all."""
        pad, start, end = (
            self._config.image_token_id,
            self._config.vision_start_token_id,
            self._config.vision_end_token_id,
        )
        media: list[tuple[int, int]] = []  # (first id, one past the last)
        opened: int | None = None
        for at, token in enumerate([*ids, start]):  # a region that is never closed is cut off by another start
            if token == self._config.video_token_id:
                raise _mismatch("a frame of a video is written <|image_pad|>", at)
            if token == start:
                if opened is not None and pad in ids[opened:at]:
                    raise _mismatch("a video ends with <|vision_end|>", opened)
                opened = at
            elif token == end and opened is not None:
                if pad in ids[opened:at]:
                    media.append((opened, at + 1))
                opened = None
            elif token == pad and opened is None:
                media.append((at, at + 1))
        pieces: list[list[int] | WrittenMedium] = []
        done = 0
        for first, last in media:
            cut = _at_pads(ids[first:last], pad)
            units = sum(isinstance(piece, int) for piece in cut)
            pieces += [list(ids[done:first]), WrittenMedium(cut, [1] * units)]
            done = last
        pieces.append(list(ids[done:]))
        return [piece for piece in pieces if piece]

    def frame(self, offset: float) -> tuple[list[int], list[int]]:
        return [self._config.vision_start_token_id, *self._stamp(offset)], [self._config.vision_end_token_id]

    def spliced(self, text: str) -> list[int]:
        start, end = self._turn
        encode = self.text
        return [end, *encode("\n"), start, *encode(f"user\n{text}"), end, *encode("\n"), start, *encode("assistant\n")]

    def _stamp(self, offset: float) -> list[int]:
        return [self._time[0], *self.text(f"{offset:.1f} seconds"), self._time[1]]


def _at_pads(ids: Sequence[int], pad: int) -> list[list[int] | int]:
    """Ids cut at their pads, which are numbered from 0."""
    pieces: list[list[int] | int] = [[]]
    for token in ids:
        if token == pad:
            pieces += [len(pieces) // 2, []]
        else:
            run = pieces[-1]
            assert isinstance(run, list)
            run.append(token)
    return [piece for piece in pieces if piece != []]


def _mismatch(message: str, at: int) -> InvalidRequest:
    return InvalidRequest("PLACEHOLDER_MISMATCH", message, facts={"index": at})
