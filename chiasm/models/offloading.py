"""The weights of a half that is in use leave its device, and come back.

What was let in is finished first; nothing new is let in meanwhile, nor until they are back. It knows neither units nor
timelines: what is under way is counted elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from chiasm.errors import Unavailable, Unsupported
from chiasm.models.residence import Residence


class Offloading:
    """Used from one event loop.

    Args:
        run: calls a function in the thread in which the half computes.
        busy: whether anything that was let in is not finished.
        captured: the half's work is recorded with the places of its weights in it, so they may not leave.
    """

    def __init__(
        self,
        residence: Residence,
        run: Callable[[Callable[[], None]], Awaitable[object]],
        busy: Callable[[], bool],
        *,
        captured: bool = False,
    ) -> None:
        self._residence = residence
        self._run = run
        self._busy = busy
        self._captured = captured
        self._refuses = False
        self._finished = asyncio.Event()
        self._turn = asyncio.Lock()

    def check(self) -> None:
        """Raises Unavailable OFFLOADED where nothing new is let in."""
        if self._refuses:
            raise offloaded()

    def finished(self) -> None:
        """Something that was let in has been finished."""
        self._finished.set()

    async def offload(self) -> None:
        """Waits until what was let in is finished, then takes the weights off the device. Cancelled while it waits it
        has changed nothing.

        Raises Unsupported OFFLOAD_CAPTURED, and as `Residence.offload`.
        """
        if self._captured:
            raise captured()
        async with self._turn:
            self._refuses = True
            try:
                while self._busy():
                    self._finished.clear()
                    await self._finished.wait()
            except BaseException:
                self._refuses = False
                raise
            try:
                # Cancelled from here on it ends at once; the weights leave all the same.
                await asyncio.shield(asyncio.ensure_future(self._run(self._residence.offload)))
            except Exception:
                self._refuses = False
                raise

    async def load(self) -> None:
        """Brings the weights back. Raises as `Residence.load`; they are then still away."""
        async with self._turn:
            await self._run(self._residence.load)
            self._refuses = False


def captured() -> Unsupported:
    """Of weights that may not leave."""
    return Unsupported("OFFLOAD_CAPTURED", "CUDA graphs read weights where they were when they were captured")


def offloaded() -> Unavailable:
    """Of weights that have left."""
    return Unavailable("OFFLOADED", "the weights are not on the device", retry_after=1.0)
