"""An encoder with a flaw: a red picture ends its process, and a green one makes its pass go on for ever. Each pass is
told in a file, and waits while another one is there."""

from __future__ import annotations

import os
import runpy
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from encoder_service.device import Device, Entry, Wanted
from tests.faults.poison import HELD, HUNG, INNOCENT, PASSES, POISON, SIGNAL, paint

_pass = Device._pass


def _is(unit: Tensor, colour: tuple[int, int, int]) -> bool:
    (pixels,) = unit  # of one frame
    return all(int(plane.min()) == int(plane.max()) == value for plane, value in zip(pixels, colour, strict=True))


def _flawed(self: Device, frames: Sequence[Wanted]) -> list[Entry]:
    told = Path(os.environ[PASSES])
    while told.with_suffix(HELD).exists():
        time.sleep(0.01)
    what = [
        POISON if _is(pixels, paint(POISON)) else HUNG if _is(pixels, paint(HUNG)) else INNOCENT for pixels, _ in frames
    ]
    with told.open("a", encoding="ascii") as file:
        file.write(" ".join(what) + "\n")
    if POISON in what:
        os.kill(os.getpid(), signal.Signals[os.environ.get(SIGNAL, "SIGSEGV")])
    if HUNG in what:
        time.sleep(3600)
    return _pass(self, frames)


if __name__ == "__main__":
    Device._pass = _flawed  # type: ignore[method-assign]
    runpy.run_module("encoder_service", run_name="__main__", alter_sys=True)
