"""A decoder with a flaw: a prompt of more than `LONG` tokens ends its process when it is computed. Each step that
computes one is told in a file."""

from __future__ import annotations

import os
import runpy
import signal
from pathlib import Path
from typing import Any

from decoder_service.model import DecoderModel
from tests.faults.poison import LONG, PASSES, POISON

_compute = DecoderModel._compute


def _flawed(self: DecoderModel, plan: Any) -> Any:
    seats = [*plan.singles, *(share.seat for share in plan.shares)]
    if any(len(seat.sequence.timeline) > LONG for seat in seats):
        with Path(os.environ[PASSES]).open("a", encoding="ascii") as file:
            file.write(f"{POISON} {len(seats)}\n")
        os.kill(os.getpid(), signal.SIGSEGV)
    return _compute(self, plan)


if __name__ == "__main__":
    DecoderModel._compute = _flawed  # type: ignore[method-assign]
    runpy.run_module("decoder_service", run_name="__main__", alter_sys=True)
