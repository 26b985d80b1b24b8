"""`chiasm ask`: one question to a router, answered as it comes.

The answer alone goes to standard output; what the model saw and what it took goes to standard error. Knows the SDK.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console

from chiasm.cli.failure import MISUSED, CommandFailed
from chiasm.cli.subject import kind_of
from chiasm.cli.telling import Teller, Waiting, line, ms, program
from chiasm.client import Client, Generation, Image, Token, Video
from chiasm.errors import ConnectionFailed, StatusError


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked. `model` None is the only one that the router has; the other None leave it to the router.

    Attributes:
        timeout: seconds of the whole; None for the client's own.
    """

    text: str
    media: Sequence[Path]
    model: str | None = None
    fps: float | None = None
    max_frames: int | None = None
    max_tokens: int | None = None
    timeout: float | None = None


def run(target: str, question: Question, people: Console, answers: TextIO | None) -> dict[str, Any]:
    """The command. Returns what `--json` prints.

    Args:
        people: is shown what is seen and what it took.
        answers: is given the answer; None to show it to people.

    Raises ChiasmError, and OSError for a file that cannot be read.
    """
    if not question.media and Path(question.text).is_file():
        what = "the question is the name of a file"
        raise CommandFailed(what, "QUESTION", f'ask first, then show: "What happens?" {question.text}', code=MISUSED)
    media = [_medium(path, question) for path in question.media]
    _check_sampling(question, media)
    try:
        with Client(target) as client:
            model = question.model or only([model.name for model in client.list_models()])
            return _ask(client, model, question, media, people, answers)
    except ConnectionFailed:
        raise CommandFailed(
            f"no server answers at {target}", "--target", f"start a model with: {program()} serve digits", code=1
        ) from None
    except StatusError as error:
        raise by_file(error, question.media) from None


def _ask(
    client: Client,
    model: str,
    question: Question,
    media: Sequence[Image | Video],
    people: Console,
    answers: TextIO | None,
) -> dict[str, Any]:
    began = time.monotonic()
    teller = Teller(people, answers)
    first_token: float | None = None
    timeout = ... if question.timeout is None else question.timeout
    content = [*media, question.text]
    waiting = Waiting(people)
    with waiting, client.stream(model, content, max_tokens=question.max_tokens, timeout=timeout) as stream:
        try:
            for event in stream:
                waiting.heard()
                after = time.monotonic() - began
                first_token = after if first_token is None and isinstance(event, Token) else first_token
                teller.tell(event, after)
        finally:
            teller.end_line()
    answer, total = stream.generation(), time.monotonic() - began
    usage = answer.usage
    said = (
        f"{len(answer.frames)} frames, {usage.visual_tokens} visual and {usage.prompt_tokens} text tokens asked, "
        f"{usage.output_tokens} answered ({answer.finish_reason})"
    )
    people.print(line("took", said, ms(total)), style="dim")
    return {**as_object(answer, model), "first_token_seconds": first_token, "seconds": total}


def as_object(answer: Generation, model: str) -> dict[str, Any]:
    """An answer as JSON has it. Times are in seconds; `frames` holds when each frame is shown, None for an image."""
    return {
        "text": answer.text,
        "ids": list(answer.ids),
        "frames": [frame.offset for frame in answer.frames],
        "usage": asdict(answer.usage),
        "finish_reason": answer.finish_reason,
        "times": asdict(answer.times),
        "model": model,
        "request_id": answer.request_id,
    }


def only(names: Sequence[str]) -> str:
    """The one model that there is. Raises CommandFailed for none, and for several."""
    if len(names) == 1:
        return names[0]
    if not names:
        raise CommandFailed("no model is served yet", "--target", f"wait until it is ready: {program()} health", code=1)
    raise CommandFailed(
        f"the router has {len(names)} models: {', '.join(names)}", "--model", f"--model {names[0]}", code=MISUSED
    )


def by_file(error: StatusError, media: Sequence[Path]) -> StatusError:
    """The same error, told about the file instead of its place in the request."""
    for index, path in enumerate(media):
        if error.item is not None and error.item.startswith(f"messages[0].content[{index}]"):
            error.item = str(path)
    return error


def _medium(path: Path, question: Question) -> Image | Video:
    if kind_of(path) == "image":
        return Image(path)
    return Video(path, fps=question.fps, max_frames=question.max_frames)


def _check_sampling(question: Question, media: Sequence[Image | Video]) -> None:
    if any(isinstance(medium, Video) for medium in media):
        return
    for flag, value in (("--fps", question.fps), ("--max-frames", question.max_frames)):
        if value is not None:
            raise CommandFailed(f"{flag} {value} without a video", flag, "leave it out, or add a video", code=MISUSED)


def print_json(said: dict[str, Any]) -> None:
    """The last line of `--json`."""
    print(json.dumps(said, ensure_ascii=False))
