"""One medium of a request at its encoders: what it was found to be, which units it becomes, what was announced.

One call tells what the medium is; a long one's units may be shared out to others. A lost encoder is replaced, by
another or by its own restart, while the medium is held here; what it had announced stays announced. Units that the
decoder could not use are encoded once more. It knows no decoder and no other medium.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

from chiasm.errors import Cancelled, ConnectionFailed, InvalidRequest, Overloaded, ServerError, Unavailable
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import encoder_pb2 as epb
from router.dispatch import Dispatch
from router.fleet import EncoderWorker
from router.media import Source
from router.spread import Spread

LOST: Final = (ConnectionFailed, Unavailable, Cancelled)
"""How a call ends whose worker died, is ending, or cannot be reached."""

PAUSE: Final = 0.1
"""Seconds before another worker is asked, when one was asked that is ending."""

EXECUTIONS: Final = 2
"""Workers that may be lost over one medium. A medium that ends two of them is not given to a third."""


class Request(Protocol):
    """What a medium needs to know of its request."""

    async def open(self, encoding: Encoding, attempt: int, worker: EncoderWorker) -> epb.EncodeOpen:
        """How the medium's call to a worker begins."""
        ...

    async def encoder(self, encoding: Encoding, rank: int) -> EncoderWorker:
        """An encoder that can be reached now: the one that equal media prefer, or the next, and so on."""
        ...

    @property
    def spread(self) -> Spread:
        """How a medium may be shared out now."""
        ...

    def start(self, work: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        """Runs a part of the request."""
        ...

    def lost(self, worker: EncoderWorker) -> None: ...

    def turned_away(self, worker: EncoderWorker, refusal: Overloaded) -> bool:
        """A worker refused a call before it began. Returns whether another may be asked."""
        ...

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
        sized_by: who said it, and the form in which entries were asked for: keys that are told are of that form.
        announced: the newest announcement of each unit.
        held: units that the decoder has without being given them.
        times: of the encoder that came to the end.
        accounted: set when they and the usage are there.
        waiting: for an encoder that can take it.
    """

    def __init__(self, request: Request, slot: int, item: str, source: Source) -> None:
        self._request = request
        self.slot = slot
        self.item = item
        self.source = source
        self.probe: pb.Probe | None = None
        self.sized: epb.EncodeSized | None = None
        self.sized_by: tuple[EncoderWorker, pb.EntryForm.ValueType] | None = None
        self.announced: dict[int, epb.EncodeReady] = {}
        self.held: set[int] = set()
        self.times = pb.StageTimes()
        self.accounted = asyncio.Event()
        self.waiting = False
        self._revision = 0
        self._usage: pb.MediaUsage | None = None
        self._elsewhere: set[int] = set()  # units that other encoders make
        self._attempt = 0
        self._losses = 0
        self._siblings: epb.EncodeSiblings | None = None
        self._gone = False
        self._calls: dict[Dispatch, EncoderWorker] = {}
        self._fallen: set[Dispatch] = set()  # calls that broke with a worker that is counted already
        self._first: Dispatch | None = None  # the one for the whole medium, which waits for go
        self._missing: set[int] = set()
        self._doubted: set[int] = set()  # of those: whose entries were found wanting
        self._again: asyncio.Task[None] | None = None

    # -- what the request tells it -----------------------------------------------------------------------------------

    def siblings(self, siblings: epb.EncodeSiblings) -> None:
        self._siblings = siblings
        for call in self._calls:
            call.siblings(siblings)

    def go(self, held: Iterable[int]) -> None:
        """A decoder has admitted what was sized: entries may be made, but for the units that it holds. Those that an
        earlier decoder held and this one does not are made too."""
        before, self.held = self.held, set(held)
        if self._gone:
            self._bring(before - self.held - self.announced.keys())
            return
        self._gone = True
        self._spread()
        if self._first is not None:
            self._first.go(_go(self._wanted()))

    def attached(self, unit: int) -> None:
        for call in self._calls:
            if unit in call.pinned:
                call.attached(unit)

    @property
    def all_announced(self) -> bool:
        sized = self.sized
        return sized is not None and sized.final and len(self.announced.keys() | self.held) >= len(sized.units)

    @property
    def usage(self) -> pb.MediaUsage | None:
        """Of the whole medium, once an encoder came to its end."""
        if self._usage is not None and self._usage.HasField("units_cached"):
            # By all calls together, as each unit was announced last, and what no call was asked for.
            cached = sum(ready.cached for ready in self.announced.values())
            self._usage.units_cached = cached + len(self.held - self.announced.keys())
        return self._usage

    def missing(self, unit: int) -> None:
        """A unit's entry could not be used: it is encoded again, together with others of this medium that go missing
        meanwhile."""
        self.attached(unit)  # what is gone pins nothing, and the first call may be waiting for its credit
        self._doubted.add(unit)
        self._bring({unit})

    def _bring(self, units: set[int]) -> None:
        self._missing |= units
        self.held -= units
        if self._missing and (self._again is None or self._again.done()):
            self._again = self._request.start(self._encode_again)

    # -- its calls ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Encodes the medium to its end. Raises ChiasmError."""
        while await self._try() is None:
            pass

    def _spread(self) -> None:
        """Gives other encoders their share of the units."""
        _, *shares = self._request.spread.shares(self._units_wanted())
        for rank, share in enumerate(shares, 1):
            self._elsewhere.update(share)
            self._request.start(partial(self._encode_part, share, rank))

    async def _encode_part(self, share: Sequence[int], rank: int) -> None:
        """Has one more encoder make some of the units."""
        part = _Part(partial(self._left, share), rank=rank)
        while (count := await self._try(part)) is None:
            pass
        self._all_there([unit for unit in share if unit < count])

    async def _encode_again(self) -> None:
        """Brings the missing units: those whose entries were found wanting whatever the store holds. Sizes stay as they
        were told."""
        while self._missing:
            doubted = self._missing & self._doubted
            wanted = doubted or set(self._missing)
            self._missing -= wanted
            self._doubted -= wanted
            for unit in wanted:
                self.announced.pop(unit, None)
            part = _Part(partial(self._left, wanted), afresh=bool(doubted))
            while await self._try(part) is None:
                pass
            self._all_there(wanted)

    def _all_there(self, wanted: Collection[int]) -> None:
        left = self._left(wanted)
        if left:
            raise ServerError(
                "ENTRY_MISSING",
                f"{len(left)} of {len(wanted)} units were asked for and not encoded",
                item=self.item,
                facts={"units": len(left)},
            )

    def _left(self, wanted: Iterable[int]) -> list[int]:
        return sorted(unit for unit in wanted if unit not in self.announced)

    async def _try(self, part: _Part | None = None) -> int | None:
        """One call to one worker: the one that tells what the medium is and how it ends, or one that fills in `part`.

        Returns how many units the medium has, or None if the worker was lost and another may be tried.
        """
        try:
            worker = await self._request.encoder(self, 0 if part is None else part.rank)
        except InvalidRequest as error:  # an upload that broke off before its first piece
            raise error.at(self.item) from None
        self._attempt += 1
        call = Dispatch(await self._request.open(self, self._attempt, worker), self.source)
        if self._siblings is not None:
            call.siblings(self._siblings)
            if part is not None:
                call.go(_go(part.units(), afresh=part.afresh, part=True))
            elif self._gone:
                call.go(_go(self._wanted()))
        if part is None:
            self._first = call
        self._calls[call] = worker
        try:
            with worker.making(await self.source.hint()):
                async with aclosing(call.run(worker, timeout=self._request.allowance)) as responses:
                    async for response in responses:
                        self._on(call, worker, response, part)
        except LOST as error:
            self._request.lost(worker)
            if call.ended:
                return call.units  # all was said; what it pinned is the decoder's to give back
            if error.reason == "DRAINING":  # it has not begun: that costs the medium nothing but a moment
                await asyncio.sleep(PAUSE)
                return None
            self._count_loss(call, worker)
            if self._losses >= EXECUTIONS:
                raise Unavailable(
                    "ENCODER_LOST",
                    f"{self._losses} encoders were lost while they worked on this medium",
                    item=self.item,
                    retry_after=1.0,
                    facts={"lost": self._losses},
                ) from error
            return None
        except Overloaded as error:
            if call.begun or not self._request.turned_away(worker, error):
                raise
            return None
        except InvalidRequest as error:
            raise error.at(self.item) from None
        finally:
            del self._calls[call]
            self._fallen.discard(call)
        if not call.ended:
            raise ServerError("STREAM_BROKEN", "an encoder ended its stream before its medium", item=self.item)
        return call.units

    def _count_loss(self, call: Dispatch, worker: EncoderWorker) -> None:
        """A worker that is lost is one loss, however many calls about this medium it had."""
        if call not in self._fallen:
            self._losses += 1
            self._fallen.update(other for other, at in self._calls.items() if at is worker)

    def _on(self, call: Dispatch, worker: EncoderWorker, response: epb.EncodeResponse, part: _Part | None) -> None:
        which = response.WhichOneof("message")
        if which == "probed" and response.probed.HasField("probe") and self.probe is None:
            self.probe = response.probed.probe
            self._request.on_probed(self)
        elif which == "sized":
            call.units = len(response.sized.units)
            if part is None:
                self._on_sized(response.sized, (worker, call.form))
        elif which == "ready":
            ready = response.ready
            if ready.unit in self.announced:
                call.attached(ready.unit)  # another call was quicker: the decoder takes that one
                return
            self.announced[ready.unit] = ready
            self._request.on_ready(self, ready)
        elif which == "end" and part is None:
            self._usage = response.end.usage
            self.times = response.end.times
            self.accounted.set()

    def _on_sized(self, sized: epb.EncodeSized, by: tuple[EncoderWorker, pb.EntryForm.ValueType]) -> None:
        if self.sized is not None and self.sized.final:
            return  # told already, by a worker that was lost
        self._revision += 1
        sized.revision = self._revision
        self.sized, self.sized_by = sized, by
        self._request.on_sized(self)

    def _wanted(self) -> list[int] | None:
        """The units that the call for the whole medium is to make. None for all."""
        if self.sized is None or not (self.announced or self.held or self._elsewhere):
            return None
        return [unit for unit in self._units_wanted() if unit not in self._elsewhere]

    def _units_wanted(self) -> list[int]:
        """The units that are neither announced yet nor held by the decoder."""
        count = 0 if self.sized is None else len(self.sized.units)
        return [unit for unit in self._left(range(count)) if unit not in self.held]


class _Part(NamedTuple):
    """What a call is for beside the one for the whole medium.

    Attributes:
        units: which are wanted, asked when go is given.
        rank: which encoder makes them, from the one that equal media prefer.
        afresh: whatever the store holds.
    """

    units: Callable[[], list[int]]
    rank: int = 0
    afresh: bool = False


def _go(units: Iterable[int] | None, *, afresh: bool = False, part: bool = False) -> epb.EncodeGo:
    wanted = [pb.UnitRange(first=unit, count=1) for unit in units or ()]
    return epb.EncodeGo(units=wanted, afresh=afresh, part=part, none=units is not None and not wanted)
