"""`chiasm demo`: one question about one clip, asked twice, with everything one can see of it.

The first answer is encoded, the second comes from the cache. For clips that come with a checkpoint the right answer is
known and compared. Knows the SDK only; every figure printed was measured or reported in this run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from chiasm import __version__
from chiasm.cli.subject import READ, Subject, choose, parameters
from chiasm.client import (
    Client,
    Content,
    FramesVisible,
    Generation,
    GenerationStream,
    Image,
    Started,
    TimelineFrame,
    Token,
    Usage,
    Video,
)

MAX_TOKENS = 128
"""More than any digit clip needs, and an end for a model that would not stop."""

WIDTH = 62
"""Columns before the figures on the right."""


@dataclass(slots=True)
class Asked:
    """One answer, and what could be seen of it.

    Attributes:
        visible: frames the model saw at each token.
        first_token, total: seconds from sending the request.
    """

    answer: Generation
    visible: list[int] = field(default_factory=list)
    first_token: float = 0.0
    total: float = 0.0

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
    size = f"{parameters(subject.folder) / 1e6:.1f} M parameters" if subject.folder else "a checkpoint of your own"
    trained = ", trained on real handwritten digits" if model == "digits" else ""
    console.print(f"chiasm {__version__} · demo · {Path(model).name} ({size}{trained})", style="bold")
    began = time.monotonic()
    with Client.in_process(model) as client:
        console.print(_line("loading", "both halves and the cache, in one process", _ms(time.monotonic() - began)))
        shown = show(client, client.list_models()[0].name, subject, console)
    if as_json:
        print(json.dumps(as_object(shown, model), ensure_ascii=False))
    return shown.right


def show(client: Client, model: str, subject: Subject, console: Console) -> Shown:
    """Asks twice and tells what happens while it happens."""
    held_out = " (held out: never seen in training)" if subject.expected is not None else ""
    console.print(_line(subject.kind, f"{subject.path.name}{held_out}"))
    console.print(_line("question", subject.question))
    medium = Video(subject.path) if subject.kind == "video" else Image(subject.path)
    content: Content = [medium, subject.question]

    first = ask(client, model, content, _Teller(console))
    console.print(_verdict(first.answer.text, subject.expected))
    usage = first.answer.usage
    sizes = ", ".join("x".join(map(str, reversed(medium.source_size))) for medium in usage.media)
    units = sum(medium.units for medium in usage.media)
    said = f"{first.encoded} of {units} units encoded ({sizes}), {usage.visual_tokens} visual tokens"
    console.print(_line("encoder", said, f"whole answer {_ms(first.total)}"))

    second = ask(client, model, content)
    cached = f"{units - second.encoded} of {units} units from the cache, {second.encoded} encoded"
    console.print(_line("again", cached, f"whole answer {_ms(second.total)}"))
    if second.answer.ids != first.answer.ids:
        console.print(_line("", f"another answer: {second.answer.text}"))
    shown = Shown(subject, first, second)
    console.print(_line("next", _next(subject)), style="dim")
    return shown


class _Teller:
    """Prints an answer as it comes: the frames it sees dim, a line for each change, then the tokens."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._open = False
        self._frames: tuple[TimelineFrame, ...] = ()

    def started(self, event: Started) -> None:
        self._frames = event.frames

    def visible(self, event: FramesVisible, after: float) -> None:
        self._end_line()
        seen = self._frames[event.first : event.first + event.count]
        said = f"{_times(seen)} visible from token {event.index} on"
        self._console.print(_line("frames", said, f"after {_ms(after)}"), style="dim")

    def token(self, event: Token, after: float) -> None:
        if not self._open:
            self._console.print(_line("answer", ""), end="")
            self._open = True
        self._console.print(event.text, end="")

    def end(self, first_token: float) -> None:
        self._end_line()
        self._console.print(_line("token 0", "", f"after {_ms(first_token)}"), style="dim")

    def _end_line(self) -> None:
        if self._open:
            self._console.print()
            self._open = False


def ask(client: Client, model: str, content: Content, teller: _Teller | None = None) -> Asked:
    """Asks once; `teller` is told every event."""
    began = time.monotonic()
    visible: list[int] = []
    first_token = 0.0
    with client.stream(model, content, max_tokens=MAX_TOKENS) as stream:
        for event in stream:
            after = time.monotonic() - began
            if isinstance(event, Token):
                first_token = first_token or after
                visible += [event.visible] * len(event.ids)
            if teller is not None:
                _tell(teller, event, after)
    return Asked(stream.generation(), visible, first_token, time.monotonic() - began)
