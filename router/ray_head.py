"""`python -m router.ray_head`: a Ray of this machine alone, for as long as this process lives.

It is a process of its own beside the controller, so that workers outlive that. It writes where Ray is into a file, says
`ready`, and ends when it is asked to or its standard input ends. If it is killed, Ray's own reaper ends the rest.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Literal

from pydantic import Field

from chiasm import log
from chiasm.settings import Settings, SettingsError, load
from router import ray_plan

_log = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 80 << 20
"""The least that Ray takes: no entry, no picture and no token goes through it."""


class HeadSettings(Settings):
    """A Ray of this machine alone."""

    address_file: Path = Field(description="where HOST:PORT is written when Ray is there")
    folder: Path = Field(description="for Ray's logs and sockets; a short path")
    log_format: Literal["text", "json"] = Field(default="text", description="how lines on standard error are written")
    supervised: bool = Field(default=False, description="end when standard input ends")


def main() -> None:
    """The command."""
    try:
        settings = load(HeadSettings, sys.argv[1:], program="python -m router.ray_head")
    except SettingsError as error:
        sys.stderr.write(f"error: {error.what}\n  where  {error.where}\n  fix    {error.fix}\n")
        sys.exit(2)
    log.configure(settings.log_format)
    _log.info("starting", extra={"role": "ray", "pid": os.getpid()})
    ended = threading.Event()
    os.environ.update(ray_plan.environment("disabled"))
    os.environ["RAY_TMPDIR"] = str(settings.folder)
    import ray

    ray.init(
        address="local",
        include_dashboard=False,
        configure_logging=False,
        log_to_driver=False,
        object_store_memory=OBJECT_STORE_BYTES,
        _system_config={"automatic_object_spilling_enabled": False},
        _temp_dir=str(settings.folder),
    )
    for number in (signal.SIGTERM, signal.SIGINT):  # Ray has put its own there
        signal.signal(number, lambda *_: ended.set())
    if settings.supervised:
        threading.Thread(target=_until_input_ends, args=(ended,), daemon=True).start()
    try:
        address = ray.get_runtime_context().gcs_address
        unnamed = settings.address_file.with_suffix(".new")
        unnamed.write_text(address, encoding="ascii")
        unnamed.rename(settings.address_file)
        _log.info("ready", extra={"target": address, "http": "none"})
        ended.wait()
    finally:
        _log.info("draining", extra={"seconds": 0})
        ray.shutdown()
    _log.info("stopped")


def _until_input_ends(ended: threading.Event) -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    ended.set()


if __name__ == "__main__":
    main()
