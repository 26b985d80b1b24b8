"""What a process writes, seen from outside: a line each, on standard error, as JSON or for people."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

PROGRAM = textwrap.dedent(
    """
    import asyncio, logging, sys, warnings
    import grpc, grpc.aio, structlog
    from chiasm import log
    log.configure(sys.argv[1])
    logger = logging.getLogger("chiasm.somewhere")
    logger.info("ready", extra={"target": "unix:/s", "seconds": 1.5, "odd": b"\\xff"})
    logger.debug("not shown")
    logger.info("%s of %d\\nlines", "two", 2)
    with structlog.contextvars.bound_contextvars(request_id="r-7"):
        logger.warning("late")
    structlog.get_logger("chiasm.other").info("hello", a=1)
    password = "hunter2"
    try:
        raise ZeroDivisionError("by zero")
    except ZeroDivisionError:
        logger.exception("failed")
    warnings.warn("careful")

    async def use_grpc():
        # A connection that is refused makes gRPC's core talk.
        async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
            try:
                await channel.unary_unary("/a/b")(b"", timeout=5)
            except grpc.aio.AioRpcError:
                pass
    asyncio.run(use_grpc())
    """
)


def written(form: str) -> str:
    done = subprocess.run([sys.executable, "-c", PROGRAM, form], capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout == "", "the log has standard error"
    return done.stderr


def test_every_line_is_json_with_its_fields() -> None:
    lines = [json.loads(line) for line in written("json").splitlines()]
    ready, two, late, other, failed, warned = lines
    assert list(ready)[:4] == ["timestamp", "level", "logger", "event"]
    assert ready["timestamp"].endswith("Z")
    assert (ready["level"], ready["logger"], ready["event"]) == ("info", "chiasm.somewhere", "ready")
    assert (ready["target"], ready["seconds"], ready["odd"]) == ("unix:/s", 1.5, "b'\\xff'")
    assert two["event"] == "two of 2\nlines", "one line all the same"
    assert (late["level"], late["request_id"]) == ("warning", "r-7")
    assert (other["event"], other["logger"], other["a"]) == ("hello", "chiasm.other", 1)
    assert "request_id" not in other
    assert "ZeroDivisionError: by zero" in failed["exception"]
    assert (warned["logger"], "careful" in warned["event"]) == ("py.warnings", True)


def test_text_has_the_same_and_no_values_of_variables() -> None:
    text = written("text")
    for part in ("ready", "target=unix:/s", "request_id=r-7", "ZeroDivisionError: by zero", "careful"):
        assert part in text
    assert "hunter2" not in text.replace('password = "hunter2"', "")
    assert "\x1b[" not in text, "no colours where there is no terminal"


def test_an_unknown_level_of_detail_of_grpc_is_left_to_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPC_VERBOSITY", "INFO")
    kept = "import os; from chiasm import log; log.configure('json'); print(os.environ['GRPC_VERBOSITY'])"
    done = subprocess.run([sys.executable, "-c", kept], capture_output=True, text=True, timeout=50, check=True)
    assert done.stdout == "INFO\n"
