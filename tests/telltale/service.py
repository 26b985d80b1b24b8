"""What the tell-tale processes have in common: the flags that the services do not know, a bug if one is asked for, and
how many tasks there are, for whoever asks.

    python -m tests.telltale.decoder --pace 0.005 --plant attached-short [flags of the service]

A bug that is reached says so once, in the log. A process that is sent `ASKED` logs `TASKS`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib
import logging
import runpy
import signal
import sys
from typing import Any, Final

REACHED: Final = "plant reached"
TASKS: Final = "tasks"
"""Lines of the log."""

ASKED: Final = signal.SIGUSR2

_log = logging.getLogger(__name__)


def taken() -> argparse.Namespace:
    """Takes what is ours from the command line, plants, and leaves the rest to the service."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--plant")
    mine, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    signal.signal(ASKED, _tell_tasks)
    if mine.plant is not None:
        # Bugs know every service: a router without one loads no model.
        plants: Any = importlib.import_module("tests.telltale.plants")
        plants.PLANTS[mine.plant].plant(plants.Planted(_reached))
    return mine


def _reached() -> None:
    _log.warning(REACHED)


def _tell_tasks(*_: object) -> None:
    running = [task for task in gc.get_objects() if isinstance(task, asyncio.Task) and not task.done()]
    _log.warning(TASKS, extra={"count": len(running), "names": sorted({str(task.get_coro()) for task in running})})


def run(module: str) -> None:
    """Runs a service as `python -m` does."""
    runpy.run_module(module, run_name="__main__", alter_sys=True)
