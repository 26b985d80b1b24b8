"""`chiasm demo`: one question about one clip, asked twice, with everything one can see of it.

The first answer is encoded, the second comes from the cache. For clips that come with a checkpoint the right answer is
known and compared. Knows the SDK only; every figure printed was measured or reported in this run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from chiasm import __version__
from chiasm.cli.subject import READ, Subject, choose, model_folder, parameters
from chiasm.client import (
    Client,
    Content,
    Event,
    FramesVisible,
    Generation,
    Image,
    Started,
    TimelineFrame,
    Token,
    Usage,
    Video,
)
from chiasm.errors import StatusError
from chiasm.models.finding import name_of

MAX_TOKENS = 128
"""More than any digit clip needs, and an end for a model that would not stop."""

MOST_LISTED = 10
"""Frames whose times are all printed."""

WIDTH = 58
"""Columns before the figures on the right."""

EXAMPLE = "YOUR_IMAGE_OR_VIDEO"

MEDIUM = "messages[0].content[0]"
"""Where errors say the medium is. People are told its file instead."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One answer, and what could be seen of it.

    Attributes:
        visible: frames the model saw at each token.
        first_token, total: seconds from sending the request; `first_token` is None where no token came.
    """

    answer: Generation
    visible: list[int]
    first_token: float | None
    total: float

    @property
    def encoded(self) -> int:
        """Units that were encoded for it, not found in the cache."""
        return encoded_units(self.answer.usage)


@dataclass(frozen=True, slots=True)
class Shown:
    """What a demonstration came to."""

    subject: Subject
    first: Asked
    second: Asked

    @property
    def right(self) -> bool | None:
        """Whether both answers are the expected one; None where that is not known."""
        if self.subject.expected is None:
            return None
        return all(asked.answer.text.strip() == self.subject.expected for asked in (self.first, self.second))


def encoded_units(usage: Usage) -> int:
    return sum(medium.units - (medium.units_cached or 0) for medium in usage.media)


def run(console: Console, *, file: Path | None, question: str | None, model: str, as_json: bool) -> bool | None:
    """The command. Returns whether the answer is right, None where that is not known.

    Raises ChiasmError, and OSError for a file that cannot be read.
    """
    subject = choose(file, question, model)
    folder = model_folder(model)
    said = f"{parameters(folder) / 1e6:.1f} M parameters"
    trained = ", trained on real handwritten digits" if model == "digits" else ""
    console.print(f"chiasm {__version__} · demo · {name_of(model, folder)} ({said}{trained})", style="bold")
    began = time.monotonic()
    with Client.in_process(model) as client:
        console.print(_line("loading", "both halves and the cache, in one process", _ms(time.monotonic() - began)))
        shown = show(client, client.list_models()[0].name, subject, console)
    if as_json:
        print(json.dumps(as_object(shown, model), ensure_ascii=False))
    return shown.right


def show(client: Client, model: str, subject: Subject, console: Console) -> Shown:
    """Asks twice and tells what happens while it happens."""
    held_out = " (held out: never seen in training)" if subject.held_out else ""
    console.print(_line(subject.kind, f"{subject.path.name}{held_out}"))
    console.print(_line("question", subject.question))
    medium = Video(subject.path) if subject.kind == "video" else Image(subject.path)
    content: Content = [medium, subject.question]

    try:
        first = ask(client, model, content, Teller(console))
    except StatusError as error:
        if error.item == MEDIUM:
            error.item = str(subject.path)
        raise
    console.print(_verdict(first.answer.text, subject.expected))
    usage = first.answer.usage
    sizes = ", ".join("x".join(map(str, reversed(medium.source_size))) for medium in usage.media)
    units = sum(medium.units for medium in usage.media)
    said = f"{first.encoded} of {units} units encoded ({sizes}), {usage.visual_tokens} visual tokens"
    console.print(_line("encoded", said, f"first token {_ms(first.first_token)}"))

    second = ask(client, model, content)
    cached = f"{units - second.encoded} of {units} units from the cache, {second.encoded} encoded"
    console.print(_line("again", cached, f"first token {_ms(second.first_token)}"))
    if second.answer.ids != first.answer.ids:
        console.print(_line("", f"another answer: {second.answer.text}"))
    shown = Shown(subject, first, second)
    console.print(_line("next", _next(subject)), style="dim")
    return shown


class Teller:
    """Prints an answer as it comes: what is seen in a dim line for each change, then the tokens."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._answering = False
        self._frames: tuple[TimelineFrame, ...] = ()

    def tell(self, event: Event, after: float) -> None:
        """after: seconds since the request was sent."""
        if isinstance(event, Started):
            self._frames = event.frames
        elif isinstance(event, FramesVisible):
            self._end_line()
            seen = self._frames[event.first : event.first + event.count]
            said = f"{listed(seen)} visible from token {event.index} on"
            self._console.print(_line("frames", said, f"after {_ms(after)}"), style="dim")
        elif isinstance(event, Token):
            if not self._answering:
                self._console.print(_line("answer", ""), end="")
                self._answering = True
            self._console.print(event.text, end="")
        else:
            self._end_line()

    def _end_line(self) -> None:
        if self._answering:
            self._console.print()
            self._answering = False


def ask(client: Client, model: str, content: Content, teller: Teller | None = None) -> Asked:
    """Asks once. `teller` is told every event."""
    began = time.monotonic()
    visible: list[int] = []
    first_token: float | None = None
    with client.stream(model, content, max_tokens=MAX_TOKENS) as stream:
        for event in stream:
            after = time.monotonic() - began
            if isinstance(event, Token):
                first_token = after if first_token is None else first_token
                visible += [event.visible] * len(event.ids)
            if teller is not None:
                teller.tell(event, after)
    return Asked(stream.generation(), visible, first_token, time.monotonic() - began)


def as_object(shown: Shown, model: str) -> dict[str, Any]:
    """What `--json` prints. Times are in seconds.

    `frames` holds when each frame is shown, None for an image; `visible` how many frames were seen at each token.
    """
    answer = shown.first.answer
    return {
        "answer": answer.text,
        "expected": shown.subject.expected,
        "right": shown.right,
        "frames": [frame.offset for frame in answer.frames],
        "visible": shown.first.visible,
        "encoded_units_first": shown.first.encoded,
        "encoded_units_second": shown.second.encoded,
        "answer_second": shown.second.answer.text,
        "first_token_seconds_first": shown.first.first_token,
        "first_token_seconds_second": shown.second.first_token,
        "seconds_first": shown.first.total,
        "seconds_second": shown.second.total,
        "finish_reason": answer.finish_reason,
        "model": model,
        "file": str(shown.subject.path),
        "question": shown.subject.question,
        "usage": asdict(answer.usage),
    }


def listed(frames: Sequence[TimelineFrame]) -> str:
    """The times of frames in few words: all of a few, the ends of many; images are counted."""
    times = [f"{frame.offset:.1f}" for frame in frames if frame.offset is not None]
    if len(times) != len(frames) or not times:
        return f"{len(frames)} {'image' if len(frames) == 1 else 'images'}"
    if len(times) > MOST_LISTED:
        times = [*times[:3], "…", times[-1]]
    return f"{' '.join(times)} s"


def _verdict(answer: str, expected: str | None) -> str:
    if expected is None:
        return _line("", "nobody told what is right")
    return _line("", "right" if answer.strip() == expected else f"wrong, right is {expected}")


def _next(subject: Subject) -> str:
    if subject.held_out and subject.question == READ and subject.kind == "video":
        return f'chiasm demo --question "Which digit is at 2.0 seconds?"   ·   chiasm demo {EXAMPLE}'
    return "chiasm demo   ·   chiasm demo --json"


def _line(label: str, said: str, figure: str = "") -> str:
    # What is streamed goes on right behind its label.
    return f"{label:<9} {said:<{WIDTH}} {figure}".rstrip() if said or figure else f"{label:<9} "


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "no token"
    return f"{seconds * 1000:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"
