"""States that were computed before, so that what is asked again is not computed again; and those being computed now.

A record holds the states of a whole prompt after one layer. It lies in the store beside the entries, under the tenant's
own key, and is evicted as they are: who shares the store finds it, and its bounds are the store's. It is sealed as an
entry is, and any doubt about it is a miss. Its key covers all that the states depend on: the tenant, the weights, the
type they are computed in, the token ids with their positions, the entries among them, the layer, and whether the
decoder is a deterministic one.

Who asks for what another call is computing waits for it (`Flight`). How many bytes of states there are at a time is
bounded here too (`StatesRoom`). It knows no step and no wire.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hmac import compare_digest
from typing import Final, NamedTuple, TypeAlias

import blake3
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chiasm.cache.entry import tag_secret
from chiasm.cache.framing import framed, u32
from chiasm.cache.sealed import SMALL, EntryKey, Sealed
from chiasm.cache.store import EntryStore
from chiasm.cache.tenant import owner
from chiasm.errors import ChiasmError, InvalidRequest

FORMAT: Final = 1
"""Of a record: raised too when states are computed by another rule."""

MOST_BYTES: Final = 64 << 20
"""Bytes of a record that is believed or written."""

_MAGIC: Final = b"CHST"
_HEADER: Final = struct.Struct("<4sI32sQQ")  # magic, format, key, rows, width


class Wanted(NamedTuple):
    """States of one prompt.

    Attributes:
        root: the tenant's.
        digest: of the prompt and of all that it is laid of (`DecodeSequence.digest`), in the tenant's own domain.
        rows: of it.
        layers: ascending.
    """

    root: bytes
    digest: bytes
    rows: int
    layers: tuple[int, ...]


_Flown: TypeAlias = tuple[bytes, tuple[int, ...]]


class Flight:
    """The right to compute states that others wait for. It ends with `land`."""

    def __init__(self, flights: dict[_Flown, Flight], flown: _Flown) -> None:
        self.landed: asyncio.Future[Tensor | None] = asyncio.get_running_loop().create_future()
        self._flights = flights
        self._flown = flown
        flights[flown] = self

    def land(self, states: Tensor | None) -> None:
        """Gives them to whoever waits; None lets another compute them. The first landing counts."""
        if not self.landed.done():
            self._flights.pop(self._flown, None)
            self.landed.set_result(states)


class KeptStates:
    """Of one model in one store.

    Args:
        width: of a state.
        dtype: in which they are computed.
        deterministic: so is the decoder. Its states are no others', which may differ in the last bit.
        workers_secret: what all workers of a fleet share.

    Attributes:
        hits, misses: prompts that were looked up and found, or not. Who has waited for another call's has found them.
        rejected: records that were found and not believed.
    """

    def __init__(
        self, store: EntryStore, *, width: int, dtype: torch.dtype, deterministic: bool, workers_secret: bytes
    ) -> None:
        self._store = store
        self._width = width
        self._dtype = dtype
        self._deterministic = deterministic
        self._workers = workers_secret
        self._flights: dict[_Flown, Flight] = {}
        self.hits = 0
        self.misses = 0
        self.rejected = 0

    async def find(self, wanted: Wanted) -> Tensor | Flight:
        """(layers, rows, width) states; or, where there are none, the right to compute them."""
        flown = (wanted.digest, wanted.layers)
        while (flight := self._flights.get(flown)) is not None:
            states = await asyncio.shield(flight.landed)
            if states is not None:
                self.hits += 1
                return states
        flight = Flight(self._flights, flown)
        try:
            found = await self._read_all(wanted)
        except BaseException:
            flight.land(None)
            raise
        if found is None:
            self.misses += 1
            return flight
        flight.land(found)
        self.hits += 1
        return found

    async def keep(self, wanted: Wanted, states: Tensor) -> None:
        """Writes records of (layers, rows, width) states. A store that has no room for them has no memory."""
        for number, layer in zip(wanted.layers, states, strict=True):
            key = self._key(wanted, number)
            if layer.nbytes <= MOST_BYTES:
                sealed = await asyncio.to_thread(self._seal, wanted, key, layer)
                try:
                    await self._store.put(sealed, key, owner=owner(wanted.root))
                except ChiasmError:
                    return

    async def _read_all(self, wanted: Wanted) -> Tensor | None:
        layers = []
        for number in wanted.layers:
            layer = await self._read(wanted, number)
            if layer is None:
                return None
            layers.append(layer)
        return torch.stack(layers)

    async def _read(self, wanted: Wanted, number: int) -> Tensor | None:
        """(rows, width) after one layer, from a record that is to be believed."""
        key = self._key(wanted, number)
        sealed = await self._store.get(key, owner=owner(wanted.root))
        if sealed is None:
            return None
        small = sealed.payload.nbytes <= SMALL
        layer = self._open(wanted, key, sealed) if small else await asyncio.to_thread(self._open, wanted, key, sealed)
        if layer is None:
            self.rejected += 1
            await self._store.discard(key)
        return layer

    def _seal(self, wanted: Wanted, key: EntryKey, layer: Tensor) -> Sealed:
        header = _HEADER.pack(_MAGIC, FORMAT, key, *layer.shape)
        data: npt.NDArray[np.uint8] = layer.contiguous().view(torch.uint8).numpy().reshape(-1)
        payload = memoryview(data)  # type: ignore[arg-type]  # an array is a buffer
        return Sealed(header, payload, _tag(tag_secret(self._workers, wanted.root), header, payload))

    def _open(self, wanted: Wanted, key: EntryKey, sealed: Sealed) -> Tensor | None:
        expected = _HEADER.pack(_MAGIC, FORMAT, key, wanted.rows, self._width)
        if sealed.header != expected or sealed.payload.nbytes != wanted.rows * self._width * self._dtype.itemsize:
            return None
        tag = _tag(tag_secret(self._workers, wanted.root), sealed.header, sealed.payload)
        if not compare_digest(tag, sealed.tag):
            return None
        data = torch.frombuffer(bytearray(sealed.payload), dtype=self._dtype)
        return data.view(wanted.rows, self._width)

    def _key(self, wanted: Wanted, number: int) -> EntryKey:
        """Under the tenant's root, as an entry's, and in a domain of its own."""
        what = [b"chiasm states", u32(FORMAT), wanted.digest, u32(number), u32(self._deterministic)]
        return blake3.blake3(framed(what), key=wanted.root).digest()


def _tag(secret: bytes, header: bytes, payload: memoryview) -> bytes:
    # Under the secret of entries: their headers begin with another magic, so neither is ever taken for the other.
    return blake3.blake3(header, key=secret).update(payload).digest()


class StatesRoom:
    """How many bytes of states there may be on the host, over all calls. Who finds no room waits, in turn.

    Attributes:
        total, held: bytes.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.held = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def check(self, size: int) -> None:
        """Raises InvalidRequest NEVER_FITS for more than there is room for."""
        if size > self.total:
            raise InvalidRequest(
                "NEVER_FITS",
                f"the states take {size} bytes, there is room for {self.total}",
                facts={"needed": size, "capacity": self.total},
            )

    @asynccontextmanager
    async def hold(self, size: int) -> AsyncIterator[None]:
        """Holds so many bytes while the block runs. Raises as `check`."""
        self.check(size)
        if self._waiting or self.held + size > self.total:
            place = (size, asyncio.get_running_loop().create_future())
            self._waiting.append(place)
            try:
                await place[1]
            except asyncio.CancelledError:
                if place[1].cancelled():
                    self._waiting.remove(place)
                    self._let_in()  # it may have stood before one that fits
                else:
                    self._give_back(size)
                raise
        else:
            self.held += size
        try:
            yield
        finally:
            self._give_back(size)

    def _give_back(self, size: int) -> None:
        self.held -= size
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting and self.held + self._waiting[0][0] <= self.total:
            size, waits = self._waiting.popleft()
            self.held += size
            waits.set_result(None)
