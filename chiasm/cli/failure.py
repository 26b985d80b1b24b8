"""What a person is told when a command fails: what, where, and what to do, in three lines.

A traceback is for bugs only. Knows the error classes and no command.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Self

import typer

from chiasm.errors import (
    AuthenticationFailed,
    Cancelled,
    CheckpointError,
    ChiasmError,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    Overloaded,
    PermissionDenied,
    StatusError,
    Unavailable,
    Unsupported,
)

FAILED = 1
MISUSED = 2
INTERRUPTED = 130

_FIXES = {
    "MEDIA_UNSUPPORTED": "give a JPEG, PNG, WebP, GIF or BMP picture, or a video (MP4, WebM, MKV, AVI, MPEG)",
    "MEDIA_TYPE_MISMATCH": "ask about the file as what it is",
    "MEDIA_DECODE_FAILED": "check that the file is whole: does a player show it to its end?",
    "MEDIA_EMPTY": "give a file that has bytes",
    "MEDIA_TOO_LARGE": "give a smaller or shorter one",
    "MEDIA_TOO_SMALL": "give a larger one",
    "NO_VIDEO_STREAM": "give a file with pictures in it, not only sound",
    "CONTEXT_LENGTH_EXCEEDED": "use fewer frames or a shorter question",
}


class CommandFailed(ChiasmError):
    """A command that cannot go on, with what a person needs to know.

    Args:
        what, where, fix: the three lines, without their labels.
        code: the exit code.
        before: lines to be shown first, as they are.
    """

    reason = "COMMAND_FAILED"

    def __init__(self, what: str, where: str, fix: str, *, code: int = FAILED, before: Sequence[str] = ()) -> None:
        super().__init__(what)
        self.what, self.where, self.fix = what, where, fix
        self.exit_code = code
        self.before = tuple(before)

    def _again(self) -> partial[Self]:
        return partial(type(self), self.what, self.where, self.fix, code=self.exit_code, before=self.before)


@contextmanager
def told(log: Callable[[ChiasmError | OSError], None] | None = None) -> Iterator[None]:
    """Turns failures of the block into three lines on standard error and an exit code.

    Args:
        log: tells them instead.
    """
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("interrupted, the request was cancelled", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        raise  # nobody reads any more; the command line ends quietly
    except (ChiasmError, OSError) as error:
        before = error.before if isinstance(error, CommandFailed) else ()
        if log is not None:
            log(error)
        else:
            for line in (*before, *lines(error)):
                typer.echo(line, err=True)
        raise typer.Exit(code(error)) from None


def code(error: ChiasmError | OSError) -> int:
    """2 where another command line would help, else 1."""
    if isinstance(error, CommandFailed):
        return error.exit_code
    return MISUSED if isinstance(error, InvalidRequest | NotFound | Unsupported | CheckpointError | OSError) else FAILED


def lines(error: ChiasmError | OSError) -> tuple[str, str, str]:
    """What, where, and what to do."""
    what, where, fix = facts(error)
    return f"error: {what}", f"  where  {where}", f"  fix    {fix}"


def facts(error: ChiasmError | OSError) -> tuple[str, str, str]:
    """What, where, and what to do, without their labels."""
    if isinstance(error, OSError):
        what = error.strerror or type(error).__name__
        return what, str(error.filename or "a file"), "give a file that can be read"
    if isinstance(error, CommandFailed):
        return error.what, error.where, error.fix
    if isinstance(error, CheckpointError):
        fix = "a model is digits, the folder of a checkpoint, or a hub name (owner/name)"
        return "; ".join(error.problems), error.where, fix
    if isinstance(error, StatusError):
        where = [error.item, error.reason, error.request_id and f"request {error.request_id}"]
        return error.message, " · ".join(part for part in where if part), _fix(error)
    stage = error.stage if isinstance(error, DeadlineExceeded) else None
    fix = "ask again" if isinstance(error, Cancelled) else "try again, or ask for less"
    return str(error), stage or type(error).__name__, fix


def _fix(error: StatusError) -> str:
    if error.retry_after is not None:
        return f"try again in {error.retry_after:g} s"
    if fits := error.facts.get("fits_with"):
        return f"ask with --{str(fits).replace('_', '-').replace('=', ' ')}"
    if error.reason in _FIXES:
        return _FIXES[error.reason]
    if isinstance(error, InvalidRequest | NotFound | Unsupported):
        return "change the request; the same one would fail again"
    if isinstance(error, AuthenticationFailed | PermissionDenied):
        return "ask with a key that may do this (CHIASM_API_KEY)"
    if isinstance(error, Overloaded | Unavailable):
        return "try again later, or ask for less"
    return "this is a fault of the server: please report it with these three lines"
