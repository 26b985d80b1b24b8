"""One medium of a request at its encoders: what it was found to be, which units it becomes, what was announced.

A lost encoder is replaced, by another or by its own restart, while the medium is held here; what it had announced stays
announced. Units that the decoder could not use are encoded once more. It knows no decoder and no other medium.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import aclosing
from functools import partial
from typing import Final, Protocol

from chiasm.errors import Cancelled, ConnectionFailed, InvalidRequest, ServerError, Unavailable
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import encoder_pb2 as epb
from router.dispatch import Dispatch
from router.fleet import EncoderWorker
from router.media import Source

LOST: Final = (ConnectionFailed, Unavailable, Cancelled)
"""How a call ends whose worker died, is ending, or cannot be reached."""

PAUSE: Final = 0.1
"""Seconds before another worker is asked, when one was asked that is ending."""

EXECUTIONS: Final = 2
"""Workers that may be lost over one medium. A medium that ends two of them is not given to a third."""


class Request(Protocol):
    """What a medium needs to know of its request."""

    def open(self, encoding: Encoding, attempt: int, worker: EncoderWorker) -> epb.EncodeOpen:
        """How the medium's call to a worker begins."""
        ...

    async def encoder(self, encoding: Encoding) -> EncoderWorker:
        """An encoder that can be reached now."""
        ...

    def lost(self, worker: EncoderWorker) -> None: ...

    @property
    def allowance(self) -> float | None:
        """Seconds that a call may take. None: no limit."""
        ...

    def on_probed(self, encoding: Encoding) -> None: ...
    def on_sized(self, encoding: Encoding) -> None: ...
    def on_ready(self, encoding: Encoding, ready: epb.EncodeReady) -> None: ...


class Encoding:
    """One medium.

    Args:
        item: its path in the caller's request.

    Attributes:
        probe: None until it is known.
        sized: what the units are, as far as is known; None before.
        announced: the newest announcement of each unit.
        held: units that the decoder has without being given them.
        usage, times: of the encoder that came to the end.
        accounted: set when they are there.
        waiting: for an encoder that can take it.
    """

    def __init__(self, request: Request, slot: int, item: str, source: Source) -> None:
        self._request = request
        self.slot = slot
        self.item = item
        self.source = source
        self.probe: pb.Probe | None = None
        self.sized: epb.EncodeSized | None = None
        self.announced: dict[int, epb.EncodeReady] = {}
        self.held: set[int] = set()
        self.usage: pb.MediaUsage | None = None
        self.times = pb.StageTimes()
        self.accounted = asyncio.Event()
        self.waiting = False
        self._revision = 0
        self._cached = 0
        self._attempt = 0
        self._losses = 0
        self._siblings: epb.EncodeSiblings | None = None
        self._gone = False
        self._calls: list[Dispatch] = []
        self._missing: set[int] = set()
        self._again: asyncio.Task[None] | None = None

    # -- what the request tells it -----------------------------------------------------------------------------------

    def siblings(self, siblings: epb.EncodeSiblings) -> None:
        self._siblings = siblings
        for call in self._calls:
            call.siblings(siblings)

    def go(self, held: Iterable[int], start: Callable[[Encoding], asyncio.Task[None]]) -> None:
        """A decoder has admitted what was sized: entries may be made, but for the units that it holds.

        `start` runs `encode_again`, for what an earlier decoder held and this one does not.
        """
        before, self.held = self.held, set(held)
        if self._gone:
            for unit in sorted(before - self.held - self.announced.keys()):
                self.missing(unit, start)
            return
        self._gone = True
        for call in self._calls:
            call.go(_go(self._wanted()))

    def attached(self, unit: int) -> None:
        for call in self._calls:
            if unit in call.pinned:
                call.attached(unit)

    @property
    def all_announced(self) -> bool:
        sized = self.sized
        return sized is not None and sized.final and len(self.announced.keys() | self.held) >= len(sized.units)

    def missing(self, unit: int, start: Callable[[Encoding], asyncio.Task[None]]) -> None:
        """A unit's entry could not be used: it is encoded again, together with others of this medium that go missing
        meanwhile. `start` runs `encode_again`."""
        self.attached(unit)  # what is gone pins nothing, and the first call may be waiting for its credit
        self._missing.add(unit)
        self.held.discard(unit)
        if self._again is None or self._again.done():
            self._again = start(self)

    # -- its calls ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Encodes the medium to its end. Raises ChiasmError."""
        while not await self._try(self._wanted, first=True):
            pass

    async def encode_again(self) -> None:
        """Encodes the missing units, whatever the store holds. Sizes stay as they were told."""
        while self._missing:
            wanted, self._missing = self._missing, set()
            for unit in wanted:
                self.announced.pop(unit, None)
            while not await self._try(partial(self._left, wanted), first=False):
                pass
            left = self._left(wanted)
            if left:
                raise ServerError(
                    "ENTRY_MISSING",
                    f"{len(left)} of {len(wanted)} units were lost and could not be encoded again",
                    item=self.item,
                    facts={"units": len(left)},
                )

    def _left(self, wanted: Iterable[int]) -> list[int]:
        return sorted(unit for unit in wanted if unit not in self.announced)

    async def _try(self, units: Callable[[], list[int]], *, first: bool) -> bool:
        """One call to one worker. False if the worker was lost and another may be tried.

        Args:
            units: which are wanted, asked when go is given; none says all.
            first: whether the call tells what the medium is and how it ends; else it only fills in units, afresh.
        """
        try:
            worker = await self._request.encoder(self)
        except InvalidRequest as error:  # an upload that broke off before its first piece
            raise error.at(self.item) from None
        self._attempt += 1
        call = Dispatch(self._request.open(self, self._attempt, worker), self.source)
        if self._siblings is not None:
            call.siblings(self._siblings)
            if self._gone:
                call.go(_go(units(), afresh=not first))
        self._calls.append(call)
        try:
            async with aclosing(call.run(worker, timeout=self._request.allowance)) as responses:
                async for response in responses:
                    self._on(call, response, first=first)
        except LOST as error:
            self._request.lost(worker)
            if call.ended:
                return True  # all was said; what it pinned is the decoder's to give back
            if error.reason == "DRAINING":  # it has not begun: that costs the medium nothing but a moment
                await asyncio.sleep(PAUSE)
                return False
            self._losses += 1
            if self._losses >= EXECUTIONS:
                raise Unavailable(
                    "ENCODER_LOST",
                    f"{self._losses} encoders were lost while they worked on this medium",
                    item=self.item,
                    retry_after=1.0,
                    facts={"lost": self._losses},
                ) from error
            return False
        except InvalidRequest as error:
            raise error.at(self.item) from None
        finally:
            self._calls.remove(call)
        if not call.ended:
            raise ServerError("STREAM_BROKEN", "an encoder ended its stream before its medium", item=self.item)
        return True

    def _on(self, call: Dispatch, response: epb.EncodeResponse, *, first: bool) -> None:
        which = response.WhichOneof("message")
        if which == "probed" and self.probe is None:
            self.probe = response.probed.probe
            self._request.on_probed(self)
        elif which == "sized" and first:
            self._on_sized(response.sized)
        elif which == "ready":
            ready = response.ready
            if ready.unit in self.announced:
                call.attached(ready.unit)  # another call was quicker: the decoder takes that one
                return
            self._cached += ready.cached and first
            self.announced[ready.unit] = ready
            self._request.on_ready(self, ready)
        elif which == "end" and first:
            self.usage = response.end.usage
            if self.usage.HasField("units_cached"):
                # By all calls together, and what no call was asked for.
                self.usage.units_cached = self._cached + len(self.held - self.announced.keys())
            self.times = response.end.times
            self.accounted.set()

    def _on_sized(self, sized: epb.EncodeSized) -> None:
        if self.sized is not None and self.sized.final:
            return  # told already, by a worker that was lost
        self._revision += 1
        sized.revision = self._revision
        self.sized = sized
        self._request.on_sized(self)

    def _wanted(self) -> list[int]:
        """The units that are neither announced yet nor held by the decoder; none says all. Where nothing is left but
        the end, the last unit stands for it."""
        if self.sized is None or not (self.announced or self.held):
            return []
        count = len(self.sized.units)
        return [unit for unit in self._left(range(count)) if unit not in self.held] or [count - 1]


def _go(units: Iterable[int], *, afresh: bool = False) -> epb.EncodeGo:
    return epb.EncodeGo(units=[pb.UnitRange(first=unit, count=1) for unit in units], afresh=afresh)
