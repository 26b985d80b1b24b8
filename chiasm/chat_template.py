"""Turns to token ids: a checkpoint's own template, or ChatML, with user text that can never become control.

A template is rendered with a secret mark in place of every piece of user text and every medium. Only what the
template itself wrote is searched for control tokens; user text is put back afterwards and encoded as ordinary text,
in one string with the template's ordinary text around it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TypeAlias

import jinja2.sandbox

from chiasm.errors import CheckpointError, InvalidRequest
from chiasm.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of medium number `index` of a request."""

    index: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One message: who speaks, and text and media in order."""

    role: str
    parts: tuple[str | Slot, ...]


Piece: TypeAlias = Sequence[int] | Slot
"""A run of token ids, or the place of a medium."""

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{{ '<|im_start|>assistant\n' if add_generation_prompt else '' }}"
)
"""Every message in its own frame, no default system prompt."""

_MARK = re.compile("\x02([0-9a-f]{32}:\\d+)\x03")
"""In place of a part: a secret, and the part's number. A pattern with the secret in it would be compiled, and kept by
`re`, for every request."""


class ChatTemplate:
    """A compiled template over one tokenizer.

    Templates are Jinja's, in its sandbox, with what those of published checkpoints use: `{% break %}`,
    `{% continue %}`, `raise_exception(message)` and `strftime_now(format)`, the local time of this server when it
    renders, as Python's `strftime` writes it. A prompt that shows a clock is another prompt when the clock has moved.
    (Names and meaning: `transformers.utils.chat_template_utils`.)

    A template is given the content of a message as one text. One that loses that is given a list of parts, of which it
    writes media itself; where it does, the place of a medium is put.

    Args:
        medium: how templates of the family write a medium; None where they write none.

    Raises CheckpointError if the template cannot be compiled, fails, or loses what is put into it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        source: str | None = None,
        *,
        medium: str | None = None,
        where: str = "chat_template",
    ) -> None:
        self._tokenizer = tokenizer
        self._medium: str | None = None
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals.update(raise_exception=_raise, strftime_now=_strftime_now)
        try:
            self._template = environment.from_string(CHATML if source is None else source)
            try:
                self._write([Turn("user", ("probe",))])
            except Exception:
                if medium is None:
                    raise
                self._medium = medium
                self._write([Turn("user", (Slot(0), "probe"))])
        except Exception as error:  # a template is code: it raises whatever it likes
            raise CheckpointError(where, [f"the chat template does not render ({type(error).__name__})"]) from None

    def render(self, turns: Sequence[Turn]) -> list[Piece]:
        """Token ids and slots of the conversation, followed by the opening of the assistant's answer.

        Raises InvalidRequest MESSAGE_ORDER if the template fails over these turns, or drops, repeats or moves any.
        """
        try:
            written = self._write(turns)
        except Exception:  # whatever the template raises; its text is the checkpoint's, not for the caller
            raise InvalidRequest("MESSAGE_ORDER", "the model's template refuses this conversation") from None
        return self._encode(written, _parts(turns))

    def _write(self, turns: Sequence[Turn]) -> list[str]:
        """What the template writes before, between and after the parts of the turns. Raises what the template raises,
        and ValueError if not every part came out once, in order."""
        nonce = secrets.token_hex(16)
        marks = [f"\x02{nonce}:{number}\x03" for number in range(sum(len(turn.parts) for turn in turns))]
        parts = iter(marks)
        if self._medium is None:
            messages = [{"role": turn.role, "content": "".join(next(parts) for _ in turn.parts)} for turn in turns]
            text = self._template.render(messages=messages, add_generation_prompt=True)
        else:
            listed = [
                {"role": turn.role, "content": [_part(part, next(parts)) for part in turn.parts]} for turn in turns
            ]
            text = self._template.render(messages=listed, add_generation_prompt=True)
            slots = [number for number, part in enumerate(_parts(turns)) if isinstance(part, Slot)]
            *before, last = text.split(self._medium)
            text = "".join(f"{one}{marks[slot]}" for one, slot in zip(before, slots, strict=True)) + last
        pieces = _MARK.split(text)
        if pieces[1::2] != [mark[1:-1] for mark in marks]:
            raise ValueError("parts of the messages were dropped, repeated or moved")
        return pieces[::2]

    def _encode(self, written: Sequence[str], parts: Sequence[str | Slot]) -> list[Piece]:
        """Runs of ordinary text, the template's and the user's together, between control tokens and slots."""
        pieces: list[Piece] = []
        ids: list[int] = []
        text: list[str] = []

        def close() -> None:
            if text:
                ids.extend(self._tokenizer.encode("".join(text)))
                text.clear()

        for i, by_template in enumerate(written):
            for piece in self._tokenizer.split(by_template):
                if isinstance(piece, str):
                    text.append(piece)
                else:
                    close()
                    ids.append(piece)
            if i < len(parts):
                part = parts[i]
                if isinstance(part, str):
                    text.append(part)
                else:
                    close()
                    pieces.extend(([*ids], part))
                    ids.clear()
        close()
        pieces.append(ids)
        return [piece for piece in pieces if piece != []]


def _parts(turns: Sequence[Turn]) -> list[str | Slot]:
    return [part for turn in turns for part in turn.parts]


def _part(part: str | Slot, mark: str) -> dict[str, str]:
    """A part as templates are given them in a list. What kind of medium a slot has makes no difference: what the
    template writes for it is replaced."""
    return {"type": "text", "text": mark} if isinstance(part, str) else {"type": "image"}


def _raise(message: str) -> str:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:  # noqa: A002 - templates may name it so
    return datetime.now().strftime(format)
