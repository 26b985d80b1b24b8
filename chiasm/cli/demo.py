"""`chiasm demo`: one question about one clip, asked twice, with everything one can see of it.

The first answer is encoded, the second comes from the cache. For clips that come with a checkpoint the right answer is
known and compared. Router, encoder and decoder are processes of their own and end with it. Every figure printed was
measured or reported in this run.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from chiasm import __version__
from chiasm.cli import interrupts
from chiasm.cli.board import Board
from chiasm.cli.interrupts import Interrupts
from chiasm.cli.subject import READ, Subject, choose, model_folder
from chiasm.cli.system import Options, running
from chiasm.cli.telling import Teller, line, ms, program
from chiasm.cli.weights import parameters
from chiasm.client import AsyncClient, Content, Generation, Image, Token, Usage, Video
from chiasm.errors import StatusError
from chiasm.models.finding import name_of

MAX_TOKENS = 128
"""More than any digit clip needs, and an end for a model that would not stop."""

ARENA_BYTES = 64 << 20
"""For the shipped model: enough for any clip that one asks it about, and made in no time."""


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

    Raises ChiasmError, KeyboardInterrupt, and OSError for a file that cannot be read.
    """
    subject = choose(file, question, model)
    folder = model_folder(model)
    said = f"{parameters(folder) / 1e6:.1f} M parameters"
    trained = ", trained on real handwritten digits" if model == "digits" else ""
    name = name_of(model, folder)
    console.print(f"chiasm {__version__} · demo · {name} ({said}{trained})", style="bold")
    options = Options(
        folder=folder, name=name, listen="127.0.0.1:0", arena_bytes=ARENA_BYTES if model == "digits" else None
    )
    shown = interrupts.run(partial(_serve_and_show, options, subject, console))
    if as_json:
        print(json.dumps(as_object(shown, model), ensure_ascii=False))
    return shown.right


async def _serve_and_show(options: Options, subject: Subject, console: Console, signals: Interrupts) -> Shown:
    board = Board(console, quiet=True)
    try:
        async with running(options, board.tell, signals) as system:
            board.close()
            console.print(line("loading", "encoder, decoder and router, three processes", ms(system.seconds)))
            async with AsyncClient(system.target) as client:
                return await show(client, (await client.list_models())[0].name, subject, console)
    finally:
        board.close()


async def show(client: AsyncClient, model: str, subject: Subject, console: Console) -> Shown:
    """Asks twice and tells what happens while it happens."""
    held_out = " (held out: never seen in training)" if subject.held_out else ""
    console.print(line(subject.kind, f"{subject.path.name}{held_out}"))
    console.print(line("question", subject.question))
    medium = Video(subject.path) if subject.kind == "video" else Image(subject.path)
    content: Content = [medium, subject.question]

    try:
        first = await ask(client, model, content, Teller(console))
    except StatusError as error:
        if error.item == MEDIUM:
            error.item = str(subject.path)
        raise
    console.print(_verdict(first.answer.text, subject.expected))
    usage = first.answer.usage
    sizes = ", ".join("x".join(map(str, reversed(medium.source_size))) for medium in usage.media)
    units = sum(medium.units for medium in usage.media)
    said = f"{first.encoded} of {units} units encoded ({sizes}), {usage.visual_tokens} visual tokens"
    console.print(line("encoded", said, f"first token {ms(first.first_token)}"))

    second = await ask(client, model, content)
    cached = f"{units - second.encoded} of {units} units from the cache, {second.encoded} encoded"
    console.print(line("again", cached, f"first token {ms(second.first_token)}"))
    if second.answer.ids != first.answer.ids:
        console.print(line("", f"another answer: {second.answer.text}"))
    shown = Shown(subject, first, second)
    console.print(line("next", _next(subject)), style="dim")
    return shown


async def ask(client: AsyncClient, model: str, content: Content, teller: Teller | None = None) -> Asked:
    """Asks once. `teller` is told every event."""
    began = time.monotonic()
    visible: list[int] = []
    first_token: float | None = None
    async with client.stream(model, content, max_tokens=MAX_TOKENS) as stream:
        async for event in stream:
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


def _verdict(answer: str, expected: str | None) -> str:
    if expected is None:
        return line("", "nobody told what is right")
    return line("", "right" if answer.strip() == expected else f"wrong, right is {expected}")


def _next(subject: Subject) -> str:
    if subject.held_out and subject.question == READ and subject.kind == "video":
        return f'{program()} demo --question "Which digit is at 2.0 seconds?"   ·   {program()} serve digits'
    return f"{program()} serve digits   ·   {program()} doctor"
