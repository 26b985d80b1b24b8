"""What a caller asks with: messages, token ids and sampling, as values that are valid once they exist.

Media are in `chiasm.client.media`. Knows no protobuf.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal, TypeAlias, get_args

from chiasm.client import checks
from chiasm.client.keywords import known_keywords
from chiasm.client.media import Frames, Handle, Image, Medium, Video
from chiasm.errors import InvalidRequest

Role: TypeAlias = Literal["system", "user", "assistant"]

Part: TypeAlias = str | Medium
Content: TypeAlias = Part | Sequence[Part]
"""A text, a medium, or a sequence of both: what one speaker says."""


@known_keywords()
@dataclass(frozen=True, slots=True)
class Message:
    """What one speaker says. A system message comes first or not at all.

    Raises InvalidRequest FIELD_OUT_OF_RANGE for an unknown role, TypeError for content that is none.
    """

    role: Role
    content: Content

    def __post_init__(self) -> None:
        if self.role not in get_args(Role):
            raise InvalidRequest.out_of_range("role", self.role, f"one of {', '.join(get_args(Role))}")
        object.__setattr__(self, "content", parts_of(self.content))


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt of a caller's own tokenizer, laid without a template.

    Attributes:
        ids: pads of media included, as the tokenizer writes them.
        media: in the order of their runs of pads.
    """

    ids: tuple[int, ...]
    media: tuple[Medium, ...]


Prompt: TypeAlias = tuple[Message, ...] | TokenPrompt


@known_keywords({"max_new_tokens": "max_tokens"})
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. None means the server's own value.

    Attributes:
        temperature: divides the logits, from 0 to 100; 0 takes the likeliest token. The server's own value is 0.
        seed: from 0 to 2**64 - 1; equal seeds draw equal tokens. Unset, it is drawn for each request.
        max_tokens: bounds the answer, from 1. Unset: the room left in the context.
        stop_token_ids: end the answer, beside the checkpoint's own.
        banned_token_ids: are never drawn.
        ignore_eos: draws on beyond the checkpoint's own end tokens.

    Raises InvalidRequest FIELD_OUT_OF_RANGE, also for NaN; TypeError for what is no number.
    """

    _: KW_ONLY
    temperature: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop_token_ids: Sequence[int] = ()
    banned_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        checks.number("temperature", self.temperature, 0, 100)
        object.__setattr__(self, "seed", checks.whole("seed", self.seed, 0, 2**64 - 1))
        object.__setattr__(self, "max_tokens", checks.max_tokens(self.max_tokens))
        for name in ("stop_token_ids", "banned_token_ids"):
            object.__setattr__(self, name, checks.token_ids(name, getattr(self, name)))
        if not isinstance(self.ignore_eos, bool):
            raise TypeError(f"ignore_eos must be True or False, not {self.ignore_eos!r}")


def parts_of(content: Content) -> tuple[Part, ...]:
    """The parts of a content. Raises TypeError for anything that is neither text nor a medium."""
    if isinstance(content, str | Image | Video | Frames | Handle):
        return (content,)
    if isinstance(content, bytes | bytearray | memoryview) or not isinstance(content, Iterable):
        raise TypeError(f"content is text, Image, Video, Frames or a sequence of them, not {type(content).__name__}")
    parts = tuple(content)
    for index, part in enumerate(parts):
        if not isinstance(part, str | Image | Video | Frames | Handle):
            raise TypeError(
                f"content[{index}] is a {type(part).__name__}; text, Image(...), Video(...) and Frames(...) are taken"
            )
    return parts


def prompt_of(
    content: Content | None,
    messages: Sequence[Message] | None,
    token_ids: Sequence[int] | None,
    media: Sequence[Medium] | None,
) -> Prompt:
    """The prompt that the arguments of a call make.

    Raises TypeError unless exactly one of `content`, `messages` and `token_ids` is given, and for `media` beside
    another than `token_ids`.
    """
    if sum(given is not None for given in (content, messages, token_ids)) != 1:
        raise TypeError("give one of content (one user turn), messages= (several turns) and token_ids=")
    if token_ids is not None:
        return TokenPrompt(checks.token_ids("token_ids", token_ids), _media(media or ()))
    if media is not None:
        raise TypeError("media= goes with token_ids=; elsewhere a medium is part of the content")
    if content is not None:
        return (Message("user", content),)
    assert messages is not None, "one of the three is given"
    if isinstance(messages, Message) or not all(isinstance(message, Message) for message in messages):
        raise TypeError("messages is a sequence of Message(role, content)")
    return tuple(messages)


def _media(media: Sequence[Medium]) -> tuple[Medium, ...]:
    if isinstance(media, Image | Video | Frames | Handle):
        return (media,)
    given = tuple(media)
    for index, medium in enumerate(given):
        if not isinstance(medium, Image | Video | Frames | Handle):
            raise TypeError(f"media[{index}] is a {type(medium).__name__}; Image, Video, Frames and Handle are taken")
    return given
