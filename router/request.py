"""What a client asks, checked before anything is started.

Every rule here is cheaper than opening a medium; what only a worker can know (pixels, frames, tokens) is checked
there. It knows messages and bounds, no worker.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Iterator, Sequence

from google.protobuf.internal.containers import RepeatedCompositeFieldContainer
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from chiasm.errors import InvalidRequest, NotFound, PermissionDenied, Unsupported
from chiasm.rpc.limits import GUIDE_BYTES, GUIDE_CHOICES, LISTED_FRAMES, TEXT_BYTES
from chiasm.rpc.tensor import NUMBER_BYTES
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import router_pb2 as rpb

MAX_MEDIA = 256
MAX_TURNS = 1024
MAX_PARTS = 4096
MAX_TOKENS = 1 << 19
MAX_LAYERS = 64
"""That one request may ask for."""

MAX_PRIORITY = 100
MAX_MIME = 255
"""Characters of a mime type. RFC 6838 allows 127 on either side of its stroke."""

STOP_BYTES = 256

_HANDLE = re.compile(r"[0-9a-f]{32}")

_LISTS = {"logit_bias": 1024, "stop": 16, "stop_token_ids": 1024, "banned_token_ids": 1 << 18}
"""Lists of the sampling options, and how long they may be."""

_RANGES: dict[str, tuple[float, float, str]] = {
    "temperature": (0, 100, "0 to 100"),
    "top_p": (math.ulp(0.0), 1, "more than 0, at most 1"),
    "min_p": (0, 1, "0 to 1"),
    "repetition_penalty": (math.ulp(0.0), 1e6, "more than 0"),
    "presence_penalty": (-2, 2, "-2 to 2"),
    "frequency_penalty": (-2, 2, "-2 to 2"),
    "max_tokens": (1, 2**31 - 1, "1 to 2147483647"),
    "n": (1, 16, "1 to 16"),
    "logprobs": (0, 20, "0 to 20"),
}


def check_generate(request: rpb.GenerateRequest) -> None:
    """Raises InvalidRequest, PermissionDenied or Unsupported for a request that cannot be served as it is."""
    check_label(request.request_id)
    _check_counts(request)
    _refuse(request, ("adapter", "budget"))
    if not -MAX_PRIORITY <= request.priority <= MAX_PRIORITY:
        raise InvalidRequest.out_of_range(
            "priority", request.priority, f"-{MAX_PRIORITY} to {MAX_PRIORITY}", "priority"
        )
    _check_sampling(request.sampling)
    _check_emitted(request)
    _no_unknown_fields(request, "")
    _check_media(request.prompt, request.media)


def check_embed(request: rpb.EmbedRequest) -> None:
    """Raises as `check_generate` does."""
    check_label(request.request_id)
    _check_counts(request)
    _refuse(request, ("adapter", "budget"))
    _check_dtype(request.dtype, "embeddings")
    _no_unknown_fields(request, "")
    _check_media(request.prompt, request.media)


def check_condition(request: rpb.ConditionRequest) -> None:
    """Raises as `check_generate` does. Whether there are such layers is for `check_layers`."""
    check_label(request.request_id)
    _check_count("layers", len(request.layers), MAX_LAYERS)
    _check_counts(request)
    _refuse(request, ("adapter", "budget"))
    _check_dtype(request.dtype, "states")
    if not request.layers:
        raise InvalidRequest("FIELD_MISSING", "no layer is named", facts={"field": "layers"})
    if len(set(request.layers)) < len(request.layers):
        raise InvalidRequest.out_of_range("layers", len(request.layers), "each layer once", "layers")
    _no_unknown_fields(request, "")
    _check_media(request.prompt, request.media)


def check_layers(request: rpb.ConditionRequest, depth: int) -> None:
    """Raises InvalidRequest FIELD_OUT_OF_RANGE, with both numbers, for a layer that a decoder of so many has not."""
    for number in request.layers:
        if not 1 <= number <= depth:
            raise InvalidRequest.out_of_range("layers", number, f"1 to {depth}", "layers")


def _check_dtype(dtype: pb.Dtype.ValueType, what: str) -> None:
    if dtype not in (pb.DTYPE_UNSPECIFIED, *NUMBER_BYTES):
        known = dtype in pb.Dtype.values()
        shown = pb.Dtype.Name(dtype).removeprefix("DTYPE_").lower() if known else f"dtype {dtype}"
        raise Unsupported("FEATURE_DISABLED", f"{what} are not sent as {shown}", facts={"field": "dtype"})


def check_estimate(request: rpb.EstimateRequest) -> None:
    """Raises as `check_generate` does."""
    check_label(request.request_id)
    _check_counts(request)
    _refuse(request, ("budget",))
    _no_unknown_fields(request, "")
    _check_media(request.prompt, request.media)


def _refuse(
    request: rpb.GenerateRequest | rpb.EmbedRequest | rpb.ConditionRequest | rpb.EstimateRequest, fields: Sequence[str]
) -> None:
    """Refuses what this release does not serve, by name."""
    said = {field.name for field, _ in request.ListFields()}
    for name in fields:
        if name in said:
            raise Unsupported("FEATURE_DISABLED", f"{name} is not served", facts={"field": name})


def _check_counts(request: rpb.GenerateRequest | rpb.EmbedRequest | rpb.ConditionRequest | rpb.EstimateRequest) -> None:
    """Bounds every list before anything walks along it: two bytes of a message are an element of one, and millions of
    them would hold up everybody else's streams."""
    turns, plain = request.prompt.conversation.turns, request.prompt.plain.parts
    _check_count("media", len(request.media), MAX_MEDIA)
    _check_count("turns", len(turns), MAX_TURNS)
    _check_count("parts", len(plain) + sum(len(turn.parts) for turn in turns), MAX_PARTS)
    _check_count("token ids", sum(len(part.tokens.ids) for part in plain), MAX_TOKENS)
    items = item_paths(request.prompt, len(request.media))
    for medium, item in zip(request.media, items, strict=True):
        _check_count("frames", len(medium.frames.frames), LISTED_FRAMES, item)
        _check_count("times", len(medium.sampling.exact_offsets), LISTED_FRAMES, item)
    if isinstance(request, rpb.GenerateRequest):
        for name, limit in _LISTS.items():
            _check_count(f"sampling.{name}", len(getattr(request.sampling, name)), limit)
        emitted = request.resume.emitted
        _check_count("sequences", len(emitted), int(_RANGES["n"][1]), "resume")
        _check_count("token ids", sum(len(sequence.ids) for sequence in emitted), MAX_TOKENS, "resume")
        _check_count("choices", len(request.sampling.guide.choice.choices), GUIDE_CHOICES, "choice")


def _check_count(what: str, count: int, limit: int, item: str | None = None) -> None:
    if count > limit:
        raise InvalidRequest(
            "TOO_MANY_ITEMS", f"{count} {what} are given, {limit} are taken", item=item,
            facts={"got": count, "limit": limit},
        )  # fmt: skip


def check_label(label: str) -> None:
    """Raises InvalidRequest FIELD_OUT_OF_RANGE for a request id that logs and metadata could not carry."""
    if len(label) > 128 or not (label.isascii() and label.isprintable()):
        allowed = "at most 128 printable ASCII characters"
        raise InvalidRequest.out_of_range("request_id", label, allowed, "request_id")


def check_mime(mime: str, item: str) -> None:
    """Raises InvalidRequest FIELD_OUT_OF_RANGE for a mime type that is none by its length."""
    if len(mime) > MAX_MIME:
        allowed = f"at most {MAX_MIME} characters"
        raise InvalidRequest.out_of_range("mime_type", mime, allowed, item)


def _check_media(prompt: pb.Prompt, media: Sequence[pb.Media]) -> None:
    """Every medium is placed once, in order, and may be opened."""
    slots = list(_check_prompt(prompt))
    # Pads bind slots too, and which tokens are pads is the decoder's to know.
    written = any(part.tokens.pads_bind_slots for part in prompt.plain.parts)
    if slots != list(range(len(media))) and not written:
        raise InvalidRequest(
            "PLACEHOLDER_MISMATCH",
            f"the prompt places media {slots[:MAX_MEDIA]}, {len(media)} came with it",
            facts={"placeholders": len(slots), "media": len(media)},
        )
    for medium, item in zip(media, item_paths(prompt, len(media)), strict=True):
        _check_medium(medium, item)


def item_paths(prompt: pb.Prompt, media: int) -> list[str]:
    """The path of each of so many media in the prompt, by slot: `messages[0].content[2]`, or `media[0]` for one that
    the caller's own tokens stand for."""
    paths = {part.slot: path for path, part in _parts(prompt) if part.WhichOneof("content") == "slot"}
    return [paths.get(slot, f"media[{slot}]") for slot in range(media)]


def seed_of(sampling: pb.SamplingParams) -> int:
    """The seed of a request: its own, or one drawn now."""
    return sampling.seed if sampling.HasField("seed") else secrets.randbits(64)


def sequences(sampling: pb.SamplingParams) -> int:
    """How many answers are asked for."""
    return sampling.n if sampling.HasField("n") else 1


def _parts(prompt: pb.Prompt) -> Iterator[tuple[str, pb.Part]]:
    if prompt.WhichOneof("form") == "plain":
        yield from ((f"parts[{i}]", part) for i, part in enumerate(prompt.plain.parts))
    for i, turn in enumerate(prompt.conversation.turns):
        yield from ((f"messages[{i}].content[{j}]", part) for j, part in enumerate(turn.parts))


def _check_prompt(prompt: pb.Prompt) -> Iterator[int]:
    """Yields the slots the prompt places, in order."""
    if prompt.WhichOneof("form") is None:
        raise InvalidRequest("FIELD_MISSING", "the prompt is missing", facts={"field": "prompt"})
    _check_order(prompt.conversation.turns)
    parts = list(_parts(prompt))
    size = sum(len(part.text.encode("utf-8", "replace")) for _, part in parts)
    if size > TEXT_BYTES:
        raise InvalidRequest(
            "TEXT_TOO_LARGE",
            f"the prompt has {size} bytes of text, {TEXT_BYTES} are allowed",
            facts={"bytes": size, "limit": TEXT_BYTES, "cause": "size"},
        )
    empty = True
    for path, part in parts:
        which = part.WhichOneof("content")
        if which is None:
            raise InvalidRequest("FIELD_MISSING", "a part is empty", item=path)
        empty = empty and not (part.text or which == "slot" or part.tokens.ids)
        if which == "slot":
            yield part.slot
    if empty:
        raise InvalidRequest("EMPTY_PROMPT", "there is neither text nor a medium")


def _check_order(turns: Sequence[pb.Turn] | RepeatedCompositeFieldContainer[pb.Turn]) -> None:
    for i, turn in enumerate(turns):
        if turn.role not in pb.Role.values() or turn.role == pb.ROLE_UNSPECIFIED:
            raise InvalidRequest.out_of_range("role", turn.role, "one that is known", f"messages[{i}]")
        if turn.role == pb.ROLE_SYSTEM and i:
            raise InvalidRequest(
                "MESSAGE_ORDER", "a system turn comes first", item=f"messages[{i}]", facts={"index": i}
            )
    if turns and turns[-1].role == pb.ROLE_ASSISTANT:
        last = len(turns) - 1
        raise InvalidRequest(
            "MESSAGE_ORDER", "the last turn is the assistant's", item=f"messages[{last}]", facts={"index": last}
        )


def _check_medium(medium: pb.Media, item: str) -> None:
    check_mime(medium.mime_type, item)
    source = medium.WhichOneof("source")
    if source is None:
        raise InvalidRequest("FIELD_MISSING", "the medium has no source", item=item, facts={"field": "source"})
    if medium.kind not in (pb.MEDIA_KIND_IMAGE, pb.MEDIA_KIND_VIDEO):
        raise InvalidRequest.out_of_range("kind", medium.kind, "an image or a video", item)
    if source == "uri":
        raise PermissionDenied("URL_NOT_ALLOWED", "this server fetches no media", item=item)
    if source == "handle" and not _HANDLE.fullmatch(medium.handle):
        # As one that is unknown: what a handle looks like is no secret, and which exist is.
        raise NotFound("MEDIA_EXPIRED", "no medium is kept under this handle; upload it again", item=item)
    if source == "frames" and not medium.frames.frames:
        raise InvalidRequest("NO_FRAMES", "the list of frames is empty", item=item)


def _check_sampling(sampling: pb.SamplingParams) -> None:
    for name, (low, high, allowed) in _RANGES.items():
        # Written so that NaN, which compares false with everything, is refused.
        value = getattr(sampling, name)
        if sampling.HasField(name) and not low <= value <= high:  # type: ignore[arg-type]
            raise InvalidRequest.out_of_range(name, value, allowed, name)
    if sampling.HasField("max_tokens") and sampling.min_tokens > sampling.max_tokens:
        raise InvalidRequest.out_of_range(
            "min_tokens", sampling.min_tokens, f"at most max_tokens ({sampling.max_tokens})", "min_tokens"
        )
    for i, string in enumerate(sampling.stop):
        if not 0 < (size := len(string.encode())) <= STOP_BYTES:
            raise InvalidRequest.out_of_range(f"stop[{i}]", size, f"a string of 1 to {STOP_BYTES} bytes", f"stop[{i}]")
    if len({entry.token_id for entry in sampling.logit_bias}) < len(sampling.logit_bias):
        raise InvalidRequest.out_of_range("logit_bias", len(sampling.logit_bias), "each token once", "logit_bias")
    for i, entry in enumerate(sampling.logit_bias):
        if not math.isfinite(entry.bias):
            raise InvalidRequest.out_of_range(f"logit_bias[{i}]", entry.bias, "finite", f"logit_bias[{i}]")
    if sampling.HasField("guide"):
        _check_guide(sampling.guide)


def _check_emitted(request: rpb.GenerateRequest) -> None:
    """What a client says that it has is of sequences that it asked for, and no longer than they may be."""
    if request.HasField("resume") and not request.resume.resume_token:
        raise InvalidRequest("FIELD_MISSING", "the resume token is missing", item="resume", facts={"field": "resume"})
    allowed, seen = sequences(request.sampling), set[int]()
    for emitted in request.resume.emitted:
        if emitted.sequence >= allowed or emitted.sequence in seen:
            raise InvalidRequest.out_of_range(
                "resume.emitted", emitted.sequence, f"each sequence below {allowed} once", "resume"
            )
        seen.add(emitted.sequence)
        if request.sampling.HasField("max_tokens") and len(emitted.ids) > request.sampling.max_tokens:
            most = f"at most max_tokens ({request.sampling.max_tokens}) of a sequence"
            raise InvalidRequest.out_of_range("resume.emitted", len(emitted.ids), most, "resume")


def _check_guide(guide: pb.Guide) -> None:
    """What it says is the decoder's to read; here it is only not too much."""
    which = guide.WhichOneof("guide")
    if which is None:
        raise InvalidRequest("FIELD_MISSING", "the guide says nothing", item="guide", facts={"field": "guide"})
    size = guide.ByteSize()
    if size > 2 * GUIDE_BYTES:
        raise InvalidRequest.out_of_range(which, size, f"at most {GUIDE_BYTES} bytes", which)


def _no_unknown_fields(message: Message, path: str) -> None:
    """An option that is not known would be an option ignored, and its answer a wrong one."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        raise InvalidRequest(
            "UNKNOWN_FIELD", f"{path or 'the request'} has a field {unknown[0].field_number} that is not known"
        )
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        inner = f"{path}.{field.name}" if path else field.name
        for i, item in enumerate(value if field.is_repeated else [value]):
            _no_unknown_fields(item, f"{inner}[{i}]" if field.is_repeated else inner)
