"""One table, both ways, between the classes of `chiasm.errors` and gRPC statuses with google.rpc details.

A status carries `ErrorInfo` always (reason, and as metadata the facts, the item and the stage), `BadRequest` when an
item is known, `RetryInfo` when the same request may succeed later, `RequestInfo` when the request is known. What came
with `to_status` comes back from `from_status` equal: class, code, reason, message, item, stage, request id, facts with
their types, and the retry delay to the nanosecond. This module knows nothing of servers and channels.

Facts are typed, metadata is text. A number or truth value is written as JSON writes it (`100`, `0.5`, `true`), a
string as it is; a string that would itself read as one of those is written as a JSON string (`"100"` with its quotes).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Protocol

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RequestInfo, RetryInfo
from google.rpc.status_pb2 import Status

from chiasm.errors import (
    AuthenticationFailed,
    Cancelled,
    ChiasmError,
    ConnectionFailed,
    DeadlineExceeded,
    Fact,
    IdleTimeout,
    InvalidRequest,
    NotFound,
    Overloaded,
    PermissionDenied,
    ServerError,
    StatusError,
    Unavailable,
    Unsupported,
)
from chiasm.rpc.times import to_duration, to_seconds

DOMAIN: Final = "chiasm"
"""Whose reasons these are (`ErrorInfo.domain`)."""

DETAILS_KEY: Final = "grpc-status-details-bin"
"""Trailing metadata under which gRPC carries a serialized google.rpc.Status."""

INTERNAL_MESSAGE: Final = "the server failed while working on this request"
"""All that a caller learns of a fault that nobody foresaw."""

CLASS_OF_CODE: Final[Mapping[str, type[StatusError]]] = MappingProxyType(
    {
        "INVALID_ARGUMENT": InvalidRequest,
        "OUT_OF_RANGE": InvalidRequest,
        "ALREADY_EXISTS": InvalidRequest,
        "UNAUTHENTICATED": AuthenticationFailed,
        "PERMISSION_DENIED": PermissionDenied,
        "NOT_FOUND": NotFound,
        "RESOURCE_EXHAUSTED": Overloaded,
        "UNAVAILABLE": Unavailable,
        "FAILED_PRECONDITION": Unsupported,
        "UNIMPLEMENTED": Unsupported,
        "INTERNAL": ServerError,
        "DATA_LOSS": ServerError,
        "ABORTED": ServerError,
        "UNKNOWN": ServerError,
    }
)
"""Which class a status code becomes. The codes not here are those of `_PLAIN` and `DEADLINE_EXCEEDED`."""

# Classes without reason and facts of their own: code and reason stand for the class.
_PLAIN: Final[tuple[type[ChiasmError], ...]] = (ConnectionFailed, Cancelled, IdleTimeout)
_PLAIN_OF_REASON: Final = {(kind.code, kind.reason): kind for kind in _PLAIN}

_NUMBER_OF_CODE: Final = {code.name: int(code.value[0]) for code in grpc.StatusCode}
_CODE_OF_NUMBER: Final = {number: name for name, number in _NUMBER_OF_CODE.items()}

# Trailing metadata is bounded (`chiasm.rpc.limits`); a status that does not fit would be replaced by one of gRPC's own.
MAX_MESSAGE: Final = 2048
"""Characters of a message that are sent."""
MAX_FACT: Final = 1024
"""Characters of one fact that are sent."""
MAX_FACTS: Final = 32
"""Facts that are sent."""

_REASON = re.compile(r"[A-Z0-9_]{1,63}")
_RESERVED = ("item", "stage")
_ESCAPE = "fact."
_MAX_RETRY_SECONDS = 7 * 86_400.0


class Call(Protocol):
    """What the table asks of a failed call; `grpc.aio.AioRpcError` and the synchronous errors answer it."""

    def code(self) -> grpc.StatusCode: ...
    def details(self) -> str | None: ...
    def trailing_metadata(self) -> Any: ...


def to_status(error: BaseException) -> Status:
    """The status that tells a caller about `error`.

    Its code decides which class comes back, so an error carries a code of its own class (`CLASS_OF_CODE`). Anything
    that is not an error of the table becomes INTERNAL with a constant text: what nobody foresaw may hold text that is
    not for the caller.
    """
    if isinstance(error, StatusError):
        return _pack(
            error.code,
            error.reason,
            error.message,
            facts=error.facts,
            item=error.item,
            retry_after=error.retry_after,
            request_id=error.request_id,
        )
    if isinstance(error, DeadlineExceeded):
        return _pack(error.code, error.reason, str(error), stage=error.stage, request_id=error.request_id)
    if isinstance(error, _PLAIN):
        return _pack(error.code, error.reason, str(error))
    return _pack("INTERNAL", "INTERNAL", INTERNAL_MESSAGE)


def from_status(status: Status) -> ChiasmError:
    """The error that `status` tells about.

    A code or reason this release does not know becomes the nearest class: an unknown code is a `ServerError`, an
    unknown reason is kept. Without `ErrorInfo` the reason is the name of the code.
    """
    code = _CODE_OF_NUMBER.get(status.code, "UNKNOWN")
    info, bad, retry, request = ErrorInfo(), BadRequest(), RetryInfo(), RequestInfo()
    for detail in status.details:
        for message in (info, bad, retry, request):
            if detail.TypeName() == message.DESCRIPTOR.full_name:
                _unpack(detail.value, message)
    reason = info.reason if _REASON.fullmatch(info.reason) else _reason_of(code, status.message)
    request_id = request.request_id or None
    # Only a status of this table may have an empty message on purpose.
    text = status.message if info.reason or status.message else f"the call ended with {code}"

    plain = _PLAIN_OF_REASON.get((code, reason))
    if plain is not None:
        return plain(text)
    if code == "CANCELLED":
        return Cancelled(text)
    if code == "DEADLINE_EXCEEDED":
        return DeadlineExceeded(text, stage=info.metadata.get("stage"), request_id=request_id)

    item = info.metadata.get("item")
    if item is None and bad.field_violations:
        item = bad.field_violations[0].field
    kind = CLASS_OF_CODE.get(code, ServerError)
    return kind(
        reason,
        text,
        item=item,
        retry_after=to_seconds(retry.retry_delay) if retry.HasField("retry_delay") else None,
        request_id=request_id,
        code=code,
        facts=_read_facts(info.metadata),
    )


def from_rpc_error(error: Call, *, answered: bool = False) -> ChiasmError:
    """The error that a failed call tells about.

    Args:
        error: what gRPC raised; it has `code()`, `details()` and `trailing_metadata()`.
        answered: whether a message of this call had come before. Without details UNAVAILABLE means then that a
            stream broke (`Unavailable`, CONNECTION_LOST), else that nobody was there (`ConnectionFailed`).

    gRPC's own text is not passed on: it holds addresses. It remains on `error`, from which the caller raises.
    """
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY and isinstance(value, bytes):
            status = Status()
            if _unpack(value, status):
                return from_status(status)
    code = error.code().name
    if code == "UNAVAILABLE":
        if answered:
            return Unavailable("CONNECTION_LOST", "the connection broke before the stream had ended")
        return ConnectionFailed("no server answered")
    if code == "DEADLINE_EXCEEDED":
        return DeadlineExceeded("the deadline of the call passed")
    if code == "CANCELLED":
        return Cancelled("the call was cancelled")
    reason = _reason_of(code, error.details() or "")
    text = {
        "MESSAGE_TOO_LARGE": "the message is larger than this connection takes; upload media instead",
        "UNIMPLEMENTED": "the server does not serve this call",
    }.get(reason, f"the call ended with {code} and no details")
    return CLASS_OF_CODE.get(code, ServerError)(reason, text, code=code)


def _pack(
    code: str,
    reason: str,
    message: str,
    *,
    facts: Mapping[str, Fact] | None = None,
    item: str | None = None,
    stage: str | None = None,
    retry_after: float | None = None,
    request_id: str | None = None,
) -> Status:
    info = ErrorInfo(reason=reason, domain=DOMAIN)
    for name, fact in list((facts or {}).items())[:MAX_FACTS]:
        info.metadata[_fact_key(_text(name, MAX_FACT))] = _write_fact(fact)
    if item is not None:
        info.metadata["item"] = _text(item, MAX_FACT)
    if stage is not None:
        info.metadata["stage"] = _text(stage, MAX_FACT)
    status = Status(code=_NUMBER_OF_CODE.get(code, _NUMBER_OF_CODE["UNKNOWN"]), message=_text(message, MAX_MESSAGE))
    status.details.add().Pack(info)
    if item is not None:
        violation = BadRequest.FieldViolation(
            field=_text(item, MAX_FACT), description=_text(message, MAX_MESSAGE), reason=reason
        )
        status.details.add().Pack(BadRequest(field_violations=[violation]))
    if retry_after is not None:
        status.details.add().Pack(RetryInfo(retry_delay=_retry_delay(retry_after)))
    if request_id is not None:
        status.details.add().Pack(RequestInfo(request_id=_text(request_id, MAX_FACT)))
    return status


def _unpack(data: bytes, message: Status | ErrorInfo | BadRequest | RetryInfo | RequestInfo) -> bool:
    """Whether `data` was read into `message`. A peer's garbage is no details, not another error."""
    try:
        message.ParseFromString(data)
    except DecodeError:
        message.Clear()
        return False
    return True


def _reason_of(code: str, details: str) -> str:
    # gRPC refuses an oversized message with the code of a full queue and no details. Trying again would not help.
    if code == "RESOURCE_EXHAUSTED" and "larger than max" in details:
        return "MESSAGE_TOO_LARGE"
    return code


def _text(value: str, limit: int) -> str:
    """`value` as a protobuf string can hold it: lone surrogates escaped, cut to `limit` characters."""
    return value.encode("utf-8", "backslashreplace").decode()[:limit]


def _fact_key(name: str) -> str:
    return f"{_ESCAPE}{name}" if name in _RESERVED or name.startswith(_ESCAPE) else name


def _write_fact(fact: Fact) -> str:
    if isinstance(fact, str):
        text = _text(fact, MAX_FACT)
        return json.dumps(text, ensure_ascii=False) if not _is_plain(text) else text
    return json.dumps(fact)


def _is_plain(text: str) -> bool:
    value = _read_fact(text)
    return isinstance(value, str) and value == text


def _read_fact(text: str) -> Fact:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, str | int | float | bool) else text


def _read_facts(metadata: Mapping[str, str]) -> dict[str, Fact]:
    return {key.removeprefix(_ESCAPE): _read_fact(text) for key, text in metadata.items() if key not in _RESERVED}


def _retry_delay(seconds: float) -> Duration:
    """`seconds` to the nanosecond, from 0 to a week; NaN is 0."""
    return to_duration(min(max(seconds, 0.0), _MAX_RETRY_SECONDS) if not math.isnan(seconds) else 0.0)
