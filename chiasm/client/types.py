"""What a caller asks with: messages, token ids and sampling, as values that are valid once they exist.

Media are in `chiasm.client.media`. Knows no protobuf.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import datetime
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


@dataclass(frozen=True, slots=True)
class PlainPrompt:
    """Parts one after another, laid without a template."""

    parts: tuple[Part, ...]


Prompt: TypeAlias = tuple[Message, ...] | TokenPrompt | PlainPrompt


@known_keywords({"resume_token": "token", "emitted": "ids", "expire_time": "expires_at"})
@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where an answer can be taken up, by whoever asks the same again: `stream.resume_point`, then `resume=`.

    Attributes:
        token: the server's word, signed: it fits this caller, this prompt and these options only.
        ids: of all tokens that came, from the first on.
        request_id: of the request that goes on.
        expires_at: until when the token is taken; None where it is not known.

    Raises InvalidRequest FIELD_OUT_OF_RANGE for an empty token and for ids that are none.
    """

    token: bytes
    ids: tuple[int, ...]
    request_id: str
    expires_at: datetime | None = None

    def __post_init__(self) -> None:
        if not self.token:
            raise InvalidRequest.out_of_range("token", "", "the bytes of a resume point")
        object.__setattr__(self, "ids", checks.token_ids("ids", self.ids))


_NUMBERS = (
    ("temperature", 0, 100),
    ("top_p", 2.0**-126, 1),  # a number that is 0 on the wire, which has 32 bits for it, is none above 0
    ("min_p", 0, 1),
    ("repetition_penalty", 2.0**-126, 1e6),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
)
_WHOLE_NUMBERS = (
    ("seed", 2**64 - 1),
    ("top_k", 2**32 - 1),
    ("logprobs", 20),
    ("min_tokens", checks.MAX_TOKENS),
)


@known_keywords({"max_new_tokens": "max_tokens", "max_completion_tokens": "max_tokens", "top_logprobs": "logprobs"})
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. None means the server's own value.

    Attributes:
        temperature: divides the logits, from 0 to 100; 0 takes the likeliest token. The server's own value is 0.
        top_p: keeps the fewest of the likeliest tokens that have this mass, above 0, at most 1.
        top_k: keeps this many of the likeliest tokens; 0 keeps all.
        min_p: keeps tokens at least this likely relative to the likeliest, from 0 to 1.
        repetition_penalty: above 1 makes tokens of prompt and output less likely, below 1 more.
        presence_penalty: is subtracted from the logit of a token that is in the output, from -2 to 2.
        frequency_penalty: is subtracted for each time it is there, from -2 to 2.
        logit_bias: by token id, what is added to its logit. At most 1,024.
        logprobs: asks for the log-probability of each token and of so many of the likeliest at its place, from 0 to 20.
        seed: from 0 to 2**64 - 1; equal seeds draw equal tokens. Unset, it is drawn for each request.
        max_tokens: bounds the answer, from 1. Unset: the room left in the context.
        min_tokens: the answer does not end by itself before so many.
        stop: a string that ends the answer and is no part of it, or up to 16 of them, each of at most 256 bytes.
        stop_token_ids: end the answer, beside the checkpoint's own.
        banned_token_ids: are never drawn.
        ignore_eos: draws on beyond the checkpoint's own end tokens.
        skip_special_tokens: leaves control tokens out of the text. Their ids come all the same.
        json_schema: the answer is JSON that is valid against this schema, a dict or its text.
        regex: the whole answer matches this regular expression (of Rust's `regex`; no look-around).
        grammar: the answer is of this context-free grammar, in the EBNF of llama.cpp, from its rule `root` on.
        choice: the answer is one of these strings.
            Of the four, one at most is taken, up to 64 KiB.

    Raises InvalidRequest FIELD_OUT_OF_RANGE, also for NaN, and SAMPLING_CONFLICT; TypeError for what is no number or no
    text.
    """

    _: KW_ONLY
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    banned_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    json_schema: str | Mapping[str, object] | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name, low, high in _NUMBERS:
            checks.number(name, getattr(self, name), low, high)
        for name, most in _WHOLE_NUMBERS:
            object.__setattr__(self, name, checks.whole(name, getattr(self, name), 0, most))
        object.__setattr__(self, "max_tokens", checks.max_tokens(self.max_tokens))
        if self.max_tokens is not None and (self.min_tokens or 0) > self.max_tokens:
            raise InvalidRequest.out_of_range("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        object.__setattr__(self, "stop", checks.stop(self.stop))
        object.__setattr__(self, "logit_bias", checks.logit_bias(self.logit_bias))
        for name in ("stop_token_ids", "banned_token_ids"):
            object.__setattr__(self, name, checks.token_ids(name, getattr(self, name)))
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, not {getattr(self, name)!r}")
        self._check_guides()

    def _check_guides(self) -> None:
        object.__setattr__(self, "json_schema", checks.json_schema(self.json_schema))
        for name in ("regex", "grammar"):
            checks.guide(name, getattr(self, name))
        object.__setattr__(self, "choice", checks.choice(self.choice))
        said = [name for name in ("json_schema", "regex", "grammar", "choice") if getattr(self, name) not in (None, ())]
        if len(said) > 1:
            raise checks.conflict(f"{said[0]} and {said[1]} bound one answer; give one of them")


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
    *,
    system: str | None = None,
) -> Prompt:
    """The prompt that the arguments of a call make.

    Raises TypeError unless exactly one of `content`, `messages` and `token_ids` is given, for `media` beside another
    than `token_ids`, and for `system` beside another than `content`.
    """
    if sum(given is not None for given in (content, messages, token_ids)) != 1:
        raise TypeError("give one of content (one user turn), messages= (several turns) and token_ids=")
    if system is not None and content is None:
        raise TypeError("system= goes with content; elsewhere it is the first of messages=")
    if token_ids is not None:
        return TokenPrompt(checks.token_ids("token_ids", token_ids), _media(media or ()))
    if media is not None:
        raise TypeError("media= goes with token_ids=; elsewhere a medium is part of the content")
    if content is not None:
        told = () if system is None else (Message("system", system),)
        return (*told, Message("user", content))
    assert messages is not None, "one of the three is given"
    if isinstance(messages, Message) or not all(isinstance(message, Message) for message in messages):
        raise TypeError("messages is a sequence of Message(role, content)")
    return tuple(messages)


def plain_prompt_of(
    content: Content | None, token_ids: Sequence[int] | None, media: Sequence[Medium] | None
) -> TokenPrompt | PlainPrompt:
    """As `prompt_of`, for a call that lays no template."""
    if (content is None) == (token_ids is None):
        raise TypeError("give one of content and token_ids=")
    if token_ids is not None:
        return TokenPrompt(checks.token_ids("token_ids", token_ids), _media(media or ()))
    if media is not None:
        raise TypeError("media= goes with token_ids=; elsewhere a medium is part of the content")
    assert content is not None, "one of the two is given"
    return PlainPrompt(parts_of(content))


def _media(media: Sequence[Medium]) -> tuple[Medium, ...]:
    if isinstance(media, Image | Video | Frames | Handle):
        return (media,)
    given = tuple(media)
    for index, medium in enumerate(given):
        if not isinstance(medium, Image | Video | Frames | Handle):
            raise TypeError(f"media[{index}] is a {type(medium).__name__}; Image, Video, Frames and Handle are taken")
    return given
