"""One line in the log for each call, at its end, however it ends: where only failures are logged, nobody can tell a
call that was cancelled from one that never came."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from chiasm.errors import ChiasmError


@contextmanager
def line(log: logging.Logger, event: str) -> Iterator[dict[str, object]]:
    """Logs `event` when the block is left, with the fields that the block has put into what it is given, `outcome` and
    `seconds`. The outcome is `ok`, `cancelled` for a caller who left, the reason of an error, or `INTERNAL`.
    """
    fields: dict[str, object] = {}
    began = time.monotonic()
    outcome = "ok"
    try:
        yield fields
    except (asyncio.CancelledError, GeneratorExit):
        outcome = "cancelled"
        raise
    except ChiasmError as error:
        outcome = error.reason
        raise
    except BaseException:
        outcome = "INTERNAL"
        raise
    finally:
        seconds = round(time.monotonic() - began, 4)
        log.info(event, extra={**fields, "outcome": fields.get("outcome", outcome), "seconds": seconds})
