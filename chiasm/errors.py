"""What can go wrong, as classes a caller can catch and a wire can carry.

One tree serves every process: the stage that finds a fault raises it here, the wire carries code, reason, item and
facts (`chiasm.rpc.status`), and the caller catches the same class with the same facts. This module knows the names of
gRPC's status codes and nothing else of gRPC.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, TypeAlias

Fact: TypeAlias = str | int | float | bool


class ChiasmError(Exception):
    """Anything this library raises on purpose."""


class CheckpointError(ChiasmError):
    """A checkpoint that cannot be served as it is.

    `problems` lists everything found wrong, not only the first: missing keys, refused options, unfilled, half-filled
    and unused weights.
    """

    def __init__(self, where: str, problems: Sequence[str]) -> None:
        self.where = where
        self.problems = tuple(problems)
        super().__init__(f"{where}: " + "; ".join(self.problems))


class ConnectionFailed(ChiasmError):
    """No server answered at all, so nothing was started."""


class Cancelled(ChiasmError):
    """The caller left, or was told to."""


class IdleTimeout(ChiasmError):
    """No event came for longer than the client's own `idle_timeout` (seconds)."""


class DeadlineExceeded(ChiasmError):
    """The deadline of the whole call passed.

    `stage` names where the time went (`queue | fetch | decode_media | encode | prefill | decode`), or is None when only
    the client's own clock fired.
    """

    code: ClassVar[str] = "DEADLINE_EXCEEDED"
    reason = "DEADLINE_EXCEEDED"

    def __init__(self, message: str, *, stage: str | None = None, request_id: str | None = None) -> None:
        super().__init__(message)
        self.stage = stage
        self.request_id = request_id


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

    @property
    def retryable(self) -> bool:
        """Whether sending the same request again may succeed. Decided where the fault was found."""
        return self.retry_after is not None

    def at(self, item: str) -> StatusError:
        """The same error, told about the part of the request it belongs to. An item already known is kept."""
        if self.item is None:
            self.item = item
        return self

    def __str__(self) -> str:
        where = f"{self.item}: " if self.item else ""
        return f"{where}{self.message} [{self.reason}]"


class InvalidRequest(StatusError):
    """The request itself is at fault; sending it again changes nothing."""

    default_code = "INVALID_ARGUMENT"


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
