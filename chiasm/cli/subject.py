"""What is asked about: the caller's file or a held-out clip, image or video, and what would be right.

The held-out clips lie beside the weights of a checkpoint that comes with chiasm, with their answers in `answers.json`.
Knows files, not models.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from chiasm.errors import CheckpointError, InvalidRequest
from chiasm.media.sniff import may_move, sniff
from chiasm.models.finding import find, name_of

READ = "Read the digits."
DESCRIBE = "Describe what you see."

Kind: TypeAlias = Literal["image", "video"]

_AT = re.compile(r"Which digit is at (\d+\.\d) seconds\?")


@dataclass(frozen=True, slots=True)
class Subject:
    """One file and one question.

    Attributes:
        expected: the right answer; None where nobody told it.
        held_out: the file comes with the checkpoint and was kept from its training.
    """

    path: Path
    kind: Kind
    question: str
    expected: str | None = None
    held_out: bool = False


def model_folder(model: str) -> Path:
    """The folder of a checkpoint, found as `Client.in_process` finds it: any folder, a name that comes with chiasm, or
    a hub name, which is downloaded the first time.

    Raises CheckpointError if there is no checkpoint.
    """
    folder = find(model, download=True)
    if not (folder / "config.json").is_file():
        raise CheckpointError(model, ["has no config.json"])
    return folder


def choose(file: Path | None, question: str | None, model: str) -> Subject:
    """What to ask about. Without a file: the longest held-out clip.

    Raises InvalidRequest FIELD_MISSING if the checkpoint has none, CheckpointError, OSError.
    """
    folder = model_folder(model)
    answers = _answers(folder)
    if file is None:
        clips = sorted(answers.get("clips", ()), key=lambda clip: len(clip["digits"]))
        if not clips:
            raise InvalidRequest(
                "FIELD_MISSING", f"{name_of(model, folder)} comes without a clip: name a file", facts={"field": "file"}
            )
        file = folder / "held_out" / clips[-1]["file"]
    question = question or (READ if answers else DESCRIBE)
    held_out = file.resolve().parent == (folder / "held_out").resolve()
    expected = _expected(answers, file.name, question) if held_out else None
    return Subject(file, kind_of(file), question, expected, held_out)


def kind_of(file: Path) -> Kind:
    """By the first bytes, never by the name. A picture that may move is a video.

    Raises OSError for a file that cannot be read, InvalidRequest MEDIA_UNSUPPORTED for what is neither, before anything
    is started or sent for it.
    """
    with file.open("rb") as opened:
        head = opened.read(1 << 16)
    if not head:
        raise InvalidRequest("MEDIA_EMPTY", "the file has no bytes", item=str(file))
    found = sniff(head)
    if found.group in ("audio", "other"):
        said = "of no format that is known" if found.name == "unknown" else f"{found.name}, neither picture nor video"
        raise InvalidRequest("MEDIA_UNSUPPORTED", f"the file is {said}", item=str(file), facts={"found": found.name})
    return "image" if found.group == "image" and not may_move(found.name, head) else "video"


def _answers(folder: Path) -> dict[str, Any]:
    path = folder / "held_out" / "answers.json"
    if not path.is_file():
        return {}
    answers: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return answers


def _expected(answers: dict[str, Any], name: str, question: str) -> str | None:
    """What is right about a held-out file; None for a question that it was not made for."""
    for clip in answers.get("clips", ()):
        if clip["file"] == name:
            if question == READ:
                return " ".join(map(str, clip["digits"]))
            if asked := _AT.fullmatch(question):
                return dict(zip(clip["seconds"], map(str, clip["digits"]), strict=True)).get(float(asked[1]))
    for image in answers.get("images", ()):
        if image["file"] == name and question == READ:
            return str(image["digit"])
    return None
