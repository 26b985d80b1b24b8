"""How Qwen3-VL writes a conversation: ChatML, and a region of pads for whatever is seen. No torch.

An image is `<|vision_start|>`, its pads, `<|vision_end|>`. Of a video every temporal patch is such a region, behind the
time at which it is shown, as text: `<1.2 seconds>`. That is the flat reading. In the nested one a further
`<|vision_start|>` and `<|vision_end|>` stand around the whole video, as the template's own wrapper does where a
processor replaces nothing but the pad. (Both as recorded: `tests/oracles/qwen3_vl`.)

A flat video begins with text, which the processor tokenises as one with the text before it: after a space or a
punctuation mark the first `<` is another token than by itself. Digits are tokens of their own, so that is all.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from chiasm.chat_template import ChatTemplate, Piece, Turn
from chiasm.errors import CheckpointError
from chiasm.media.types import Kind
from chiasm.models.family import WrittenMedium
from chiasm.models.qwen3_vl.config import Config
from chiasm.tokenizer import Tokenizer

START, END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
_TURN = ("<|im_start|>", "<|im_end|>")
_TEXT_END = "<|endoftext|>"
_STAMP = re.compile(rb"<(\d{1,9}\.\d) seconds>\Z")
_STAMP_IDS = 32
"""Ids that are looked at for a time: one has at most 21 bytes."""


class Qwen3VLPrompt:
    """`Prompt` of one checkpoint.

    Raises CheckpointError listing every control token that the tokenizer lacks or numbers otherwise than config.json.

    Attributes:
        control: ids of control tokens by name.
        silence_id: None: the family has no token with which a model waits.
    """

    silence_id: int | None = None

    def __init__(self, config: Config, tokenizer: Tokenizer, template: str | None) -> None:
        problems = [f"has no {name}" for name in _TURN if name not in tokenizer.control]
        for name, token in (
            (IMAGE, config.image_token_id),
            (VIDEO, config.video_token_id),
            (START, config.vision_start_token_id),
            (END, config.vision_end_token_id),
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
        self._template = ChatTemplate(tokenizer, template, medium=f"{START}{IMAGE}{END}")
        self._turn = [tokenizer.control[name] for name in _TURN]
        self._start, self._end = config.vision_start_token_id, config.vision_end_token_id

    @property
    def stop_ids(self) -> frozenset[int]:
        """The end of a turn, and the end of a text where the tokenizer has one: released models stop at both."""
        return frozenset({self._turn[1], self.control.get(_TEXT_END, self._turn[1])})

    @property
    def banned_ids(self) -> frozenset[int]:
        return frozenset({self._config.image_token_id, self._config.video_token_id})

    def turns(self, turns: Sequence[Turn]) -> list[Piece]:
        return self._template.render(turns)

    def opening(self, kind: Kind) -> str:
        return "<" if kind == "video" and not self._config.nested_videos else ""

    def medium(self, kind: Kind, offsets: Sequence[float]) -> list[list[int] | int]:
        if kind == "image":
            return [[self._start], 0, [self._end]]
        opening = self.opening(kind)
        pieces: list[list[int] | int] = []
        before = [] if opening else [self._start]
        for number, offset in enumerate(offsets):
            stamp = self.text(_stamp(offset).removeprefix("" if number else opening))
            pieces += [[*before, *stamp, self._start], number]
            before = [self._end]
        return [*pieces, before if opening else [*before, self._end]]

    def written(self, ids: Sequence[int]) -> list[list[int] | WrittenMedium]:
        """Pads without a break are one unit. A run of image pads is a medium; so are runs of video pads, as far as
        nothing but times that do not go back stand between them. What is around and between stays as it was written."""
        media: list[list[_Run]] = []
        for run in self._runs(ids):
            if media and self._continues(ids, media[-1][-1], run):
                media[-1].append(run)
            else:
                media.append([run])
        pieces: list[list[int] | WrittenMedium] = []
        done = 0
        for runs in media:
            pieces += [list(ids[done : runs[0].start]), _written(ids, runs)]
            done = runs[-1].stop
        pieces.append(list(ids[done:]))
        return [piece for piece in pieces if piece]

    def frame(self, offset: float) -> tuple[list[int], list[int]]:
        return [*self.text(_stamp(offset)), self._start], [self._end]

    def spliced(self, text: str) -> list[int]:
        start, end = self._turn
        encode = self.text
        return [end, *encode("\n"), start, *encode(f"user\n{text}"), end, *encode("\n"), start, *encode("assistant\n")]

    # -- ids that a caller wrote -----------------------------------------------------------------------------------

    def _runs(self, ids: Sequence[int]) -> Iterator[_Run]:
        start = 0
        for pad, same in itertools.groupby(ids):
            stop = start + sum(1 for _ in same)
            if pad in self.banned_ids:
                yield _Run(pad, start, stop)
            start = stop

    def _continues(self, ids: Sequence[int], last: _Run, run: _Run) -> bool:
        """Whether a run is a further unit of the medium that another is of. Time goes on within a video."""
        if {last.pad, run.pad} != {self._config.video_token_id}:
            return False
        between = ids[last.stop : run.start]
        if len(between) < 2 or between[0] != self._end or not all(map(self.token_bytes, between[1:-1])):
            return False
        before = ids[max(0, last.start - _STAMP_IDS) : last.start]
        earlier, later = self._time(before), self._time(between[1:])
        return earlier is not None and later is not None and earlier.at <= later.at and later.alone

    def _time(self, before: Sequence[int]) -> _Time | None:
        """The time that stands before the vision start with which some ids end."""
        if not before or before[-1] != self._start:
            return None
        found = _STAMP.search(b"".join(map(self.token_bytes, before[:-1])))
        return None if found is None else _Time(float(found[1]), found.start() == 0)


def _stamp(offset: float) -> str:
    return f"<{offset:.1f} seconds>"


class _Run(NamedTuple):
    """ids[start:stop] are all the same pad."""

    pad: int
    start: int
    stop: int


class _Time(NamedTuple):
    """Seconds, and whether nothing else is written before them."""

    at: float
    alone: bool


def _written(ids: Sequence[int], runs: Sequence[_Run]) -> WrittenMedium:
    pieces: list[list[int] | int] = [0]
    for number, (last, run) in enumerate(itertools.pairwise(runs), start=1):
        pieces += [list(ids[last.stop : run.start]), number]
    return WrittenMedium(pieces, [run.stop - run.start for run in runs])
