"""How lines for people look: a label, what is said, a figure on the right. And an answer as it comes.

Knows the events of the SDK and a console; every figure is given to it.
"""

from __future__ import annotations

import shutil
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from rich.console import Console

from chiasm.client.events import Event, FramesVisible, Started, TimelineFrame, Token

WIDTH = 58
"""Columns before the figures on the right."""

MOST_LISTED = 10
"""Frames whose times are all printed."""


def console(*, stderr: bool = False) -> Console:
    """A console that prints what it is given: no markup, no emoji, no wrapping."""
    return Console(stderr=stderr, highlight=False, soft_wrap=True, emoji=False, markup=False)


def line(label: str, said: str, figure: str = "") -> str:
    """One line; without `said` and `figure` only its label, and the space behind which a stream goes on."""
    return f"{label:<9} {said:<{WIDTH}} {figure}".rstrip() if said or figure else f"{label:<9} "


def ms(seconds: float | None) -> str:
    """A short time in words; None is that of a token that never came."""
    if seconds is None:
        return "no token"
    return f"{seconds * 1000:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"


def size(count: float) -> str:
    """Bytes in words, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def listed(frames: Sequence[TimelineFrame]) -> str:
    """The times of frames in few words: all of a few, the ends of many; images are counted."""
    times = [f"{frame.offset:.1f}" for frame in frames if frame.offset is not None]
    if len(times) != len(frames) or not times:
        return f"{len(frames)} {'image' if len(frames) == 1 else 'images'}"
    if len(times) > MOST_LISTED:
        times = [*times[:3], "…", times[-1]]
    return f"{' '.join(times)} s"


def program() -> str:
    """How to call this command again, as it was called: its name alone where the shell finds it by that."""
    called, name = Path(sys.argv[0]), "chiasm"
    found = shutil.which(name)
    elsewhere = called.name == name and (found is None or Path(found).resolve() != called.resolve())
    return str(called) if elsewhere else name


class Waiting:
    """Says that nothing has come yet, once, when it has been so for a while. Used as `with waiting:`.

    Args:
        seconds: of silence.
    """

    def __init__(self, console: Console, seconds: float = 3.0) -> None:
        self._timer = threading.Timer(seconds, self._say)
        self._timer.daemon = True
        self._console = console

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def heard(self) -> None:
        """Something has come."""
        self._timer.cancel()

    def _say(self) -> None:
        said = "for the answer: a worker may be starting, or media are being encoded; Ctrl-C cancels"
        self._console.print(line("waiting", said), style="dim")


class Teller:
    """Prints an answer as it comes: what is seen in a dim line for each change, then the tokens.

    Args:
        answers: where the tokens go, alone and as they are; None puts them behind a label on `console`.
    """

    def __init__(self, console: Console, answers: TextIO | None = None) -> None:
        self._console = console
        self._answers = answers
        self._answering = False
        self._frames: tuple[TimelineFrame, ...] = ()

    def tell(self, event: Event, after: float) -> None:
        """after: seconds since the request was sent."""
        if isinstance(event, Started):
            self._frames = event.frames
        elif isinstance(event, FramesVisible):
            if self._answers is None or self._answers.isatty():
                self.end_line()
            seen = self._frames[event.first : event.first + event.count]
            said = f"{listed(seen)} visible from token {event.index} on"
            self._console.print(line("frames", said, f"after {ms(after)}"), style="dim")
        elif isinstance(event, Token):
            if not self._answering:
                self._write("" if self._answers else line("answer", ""))
                self._answering = True
            self._write(event.text)
        else:
            self.end_line()

    def end_line(self) -> None:
        """Ends the line of an answer that was begun."""
        if self._answering:
            self._write("\n")
            self._answering = False

    def _write(self, text: str) -> None:
        if self._answers is None:
            self._console.print(text, end="")
        else:
            self._answers.write(text)
            self._answers.flush()
