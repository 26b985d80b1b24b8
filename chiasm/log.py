"""How a process writes its log: lines on standard error, for people or as JSON.

Modules log through `logging.getLogger(__name__)`, with what belongs to a line in `extra`. Only the process that owns
its standard error calls `configure`; a program that uses this library keeps its own. What is logged is not known here.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Literal, TextIO, TypeAlias

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

Format: TypeAlias = Literal["text", "json"]


def configure(format_: Format, *, level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Sends everything that is logged in this process to `stream`, a line each.

    A JSON line has `timestamp` (ISO 8601, UTC), `level`, `logger`, `event`, the fields of `extra` and of
    `structlog.contextvars`, and `exception` where there is a traceback. Warnings are logged too, by `py.warnings`. gRPC
    itself writes no more than its errors, unless `GRPC_VERBOSITY` says otherwise.

    Args:
        format_: `text` is coloured on a terminal.
        level: below it nothing is written.
        stream: standard error by default.
    """
    out = sys.stderr if stream is None else stream
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    last: list[Processor]
    if format_ == "json":
        render = structlog.processors.JSONRenderer(default=str)
        last = [structlog.processors.format_exc_info, _first_things_first, render]
    else:
        # The richer traceback would print the values of local variables: prompts, keys.
        plain = structlog.dev.plain_traceback
        last = [structlog.dev.ConsoleRenderer(colors=out.isatty(), exception_formatter=plain)]
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    root = logging.getLogger()
    for old in tuple(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)
    logging.captureWarnings(True)
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
    )
    # gRPC's core writes to standard error past all of this, and reads how much from the environment when it starts.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


def _first_things_first(logger: WrappedLogger, name: str, fields: EventDict) -> EventDict:
    first = ("timestamp", "level", "logger", "event")
    return {key: fields[key] for key in first} | {key: value for key, value in fields.items() if key not in first}
