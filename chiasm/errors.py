"""What can go wrong, as classes a caller can catch and a wire can carry.

One tree serves every process: the stage that finds a fault raises it here, the wire carries code, reason, item and
facts (`chiasm.rpc.status`), and the caller catches the same class with the same facts. This module knows the names of
gRPC's status codes and nothing else of gRPC.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Final, Self, TypeAlias

Fact: TypeAlias = str | int | float | bool

MAX_SHOWN: Final = 160
"""Characters of a caller's own value that a message repeats."""


class ChiasmError(Exception):
    """Anything this library raises on purpose.

    Every attribute can be asked of every class, so that one `except ChiasmError` can decide by them. Errors can be
    copied and pickled; cause, context and traceback stay behind, as with every exception.

    Attributes:
        code: name of a gRPC status.
        reason: stable upper-case word for programs.
        item, request_id: the part of the request it is about, and the request; None where there is none to name.
        retry_after: seconds after which the same request may succeed; None means that nobody promises it.
        facts: every value shown in the message, by name.
    """

    code: str = "UNKNOWN"
    reason: str = "UNKNOWN"
    item: str | None = None
    request_id: str | None = None
    retry_after: float | None = None
    facts: Mapping[str, Fact] = MappingProxyType({})

    @property
    def retryable(self) -> bool:
        """Whether sending the same request again may succeed. Decided where the fault was found."""
        return self.retry_after is not None

    def __reduce__(self) -> tuple[Any, ...]:
        notes = getattr(self, "__notes__", None)
        state = None if notes is None else {"__notes__": list(notes)}
        return self._again(), (), state

    def _again(self) -> partial[Self]:
        """Makes the same error once more, by the keywords of its class."""
        return partial(type(self), *self.args)


class CheckpointError(ChiasmError):
    """A checkpoint that cannot be served as it is.

    `problems` lists everything found wrong, not only the first: missing keys, refused options, unfilled, half-filled
    and unused weights.
    """

    code = "FAILED_PRECONDITION"
    reason = "CHECKPOINT_REFUSED"

    def __init__(self, where: str, problems: Sequence[str]) -> None:
        self.where = where
        self.problems = tuple(problems)
        super().__init__(f"{where}: " + "; ".join(self.problems))

    def _again(self) -> partial[Self]:
        return partial(type(self), where=self.where, problems=self.problems)


class ConnectionFailed(ChiasmError):
    """No server answered at all, so nothing was started."""

    code = "UNAVAILABLE"
    reason = "CONNECTION_FAILED"


class Cancelled(ChiasmError):
    """The caller left, or was told to."""

    code = "CANCELLED"
    reason = "CANCELLED"


class IdleTimeout(ChiasmError):
    """No event came for longer than the client's own `idle_timeout` (seconds)."""

    code = "DEADLINE_EXCEEDED"
    reason = "IDLE_TIMEOUT"


class DeadlineExceeded(ChiasmError):
    """The deadline of the whole call passed.

    `stage` names where the time went (`upload | fetch | queue | decode_media | encode | prefill | decode`), or is None
    when only the client's own clock fired.
    """

    code = "DEADLINE_EXCEEDED"
    reason = "DEADLINE_EXCEEDED"

    def __init__(self, message: str, *, stage: str | None = None, request_id: str | None = None) -> None:
        super().__init__(message)
        self.stage = stage
        self.request_id = request_id

    def _again(self) -> partial[Self]:
        return partial(type(self), *self.args, stage=self.stage, request_id=self.request_id)


class StatusError(ChiasmError):
    """A request that was answered with a refusal or a failure.

    Args:
        reason: stable upper-case word, at most 63 characters, for programs.
        message: one sentence for people. It says what, and the numbers; never a library's text, an address or a path.
        item: path of the offending part inside the request, for example `messages[0].content[2]`.
        retry_after: seconds after which the same request may succeed. None means that it will not.
        code: gRPC status name, where a class stands for several.
        facts: every value shown in the message, by name.
    """

    default_code: ClassVar[str] = "UNKNOWN"

    def __init__(
        self,
        reason: str,
        message: str,
        *,
        item: str | None = None,
        retry_after: float | None = None,
        request_id: str | None = None,
        code: str | None = None,
        facts: Mapping[str, Fact] | None = None,
    ) -> None:
        super().__init__(message)
        assert reason and len(reason) <= 63 and reason.upper() == reason, f"not a reason: {reason!r}"
        self.reason = reason
        self.message = message
        self.item = item
        self.retry_after = retry_after
        self.request_id = request_id
        self.code = code or self.default_code
        self.facts: dict[str, Fact] = dict(facts or {})

    def _again(self) -> partial[Self]:
        return partial(
            type(self),
            reason=self.reason,
            message=self.message,
            item=self.item,
            retry_after=self.retry_after,
            request_id=self.request_id,
            code=self.code,
            facts=dict(self.facts),
        )

    def at(self, item: str) -> StatusError:
        """The same error, told about the part of the request it belongs to. An item already known is kept."""
        if self.item is None:
            self.item = item
        return self

    def __str__(self) -> str:
        # A message that begins with the item is not given it twice.
        where = f"{self.item}: " if self.item and not self.message.startswith(f"{self.item} ") else ""
        return f"{where}{self.message} [{self.reason}]"


class InvalidRequest(StatusError):
    """The request itself is at fault; sending it again changes nothing."""

    default_code = "INVALID_ARGUMENT"

    @classmethod
    def out_of_range(cls, field: str, value: object, allowed: str, item: str | None = None) -> Self:
        """FIELD_OUT_OF_RANGE: names the field, its value and what would be allowed, in the message and in the facts.

        Args:
            field: the caller's name for it.
            value: what came. Text is shown quoted and cut, a number of more than 128 bits by its length.
            allowed: goes on from "must be", for example `0 to 100`.
            item: as for every error; nothing is said twice if it is the field itself.
        """
        shown, fact = _show(value)
        return cls(
            "FIELD_OUT_OF_RANGE",
            f"{field} is {shown}, must be {allowed}",
            item=item,
            facts={"field": field, "value": fact, "range": allowed},
        )


class AuthenticationFailed(StatusError):
    """No valid credential came with the call."""

    default_code = "UNAUTHENTICATED"


class PermissionDenied(StatusError):
    """The caller is known and may not do this."""

    default_code = "PERMISSION_DENIED"


class NotFound(StatusError):
    """No such model, handle or adapter, or none that this caller may see."""

    default_code = "NOT_FOUND"


class Overloaded(StatusError):
    """A bounded queue, pool or quota is full. Worth trying again when `retry_after` is set."""

    default_code = "RESOURCE_EXHAUSTED"


class Unavailable(StatusError):
    """No replica can take the request at the moment."""

    default_code = "UNAVAILABLE"


class Unsupported(StatusError):
    """A known operation, option or checkpoint that this build, model or server does not do."""

    default_code = "FAILED_PRECONDITION"


class ServerError(StatusError):
    """A fault on the server's side: a bug, a lost part, a non-finite value."""

    default_code = "INTERNAL"


def _show(value: object) -> tuple[str, Fact]:
    """A caller's value as text of bounded length, and as a fact."""
    if isinstance(value, bool):
        return str(value), value
    if isinstance(value, int):
        # Python refuses to write numbers of some thousand digits at all.
        short = value.bit_length() <= 128
        return (str(value), value) if short else (said := f"a number of {value.bit_length()} bits", said)
    if isinstance(value, float):
        # What is not finite is text as a fact too: a NaN would not even equal itself, and JSON has none of them.
        shown = f"{value:.12g}"
        return shown, float(value) if math.isfinite(value) else shown
    text = value if isinstance(value, str) else str(value)
    return ascii(text)[:MAX_SHOWN], text[:MAX_SHOWN]
