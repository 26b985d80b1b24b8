"""One address of a fleet: asked again and again who answers there, until it is closed.

It knows answers and clocks. What a worker serves, and which workers fit together, is for the fleet to judge.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Final, Generic, Protocol, TypeVar

from chiasm.errors import ChiasmError, DeadlineExceeded
from chiasm.rpc.v1 import common_pb2 as pb
from router.fleet import Form, Reach, Worker

INFO_SECONDS: Final = 5.0
"""A worker that does not say who it is within this time is not asked anything else."""

FIRST_RETRY: Final = 0.1
"""Seconds to the second question to a worker that did not answer; each later wait is twice as long, up to a beat."""


class Model(Protocol):
    """What both say of a model."""

    @property
    def name(self) -> str: ...
    @property
    def forms(self) -> Iterable[Form]: ...


class Info(Protocol):
    """What an encoder and a decoder say alike."""

    @property
    def replica(self) -> pb.Replica: ...
    @property
    def load(self) -> pb.Load: ...
    @property
    def draining(self) -> bool: ...
    @property
    def models(self) -> Iterable[Model]: ...


C = TypeVar("C")
I = TypeVar("I", bound=Info)  # noqa: E741 - an Info


class Member(Generic[C, I]):
    """Asks from its making on.

    Args:
        calls: what the worker can be asked.
        ask: asks who it is; `timeout` in seconds. Raises ChiasmError.
        end: closes the way to it.
        changed: called when a worker came or went.
        beat: seconds between two questions.
    """

    def __init__(
        self,
        calls: C,
        ask: Callable[..., Awaitable[I]],
        end: Callable[[], Awaitable[None]],
        changed: Callable[[], None],
        *,
        beat: float,
    ) -> None:
        self._calls = calls
        self._ask = ask
        self._end = end
        self._changed = changed
        self._beat = beat
        self._worker: Worker[C] | None = None  # the last that answered here
        self._before: list[Worker[C]] = []  # those before it on which something still runs
        self._up: tuple[Worker[C], I] | None = None
        self._doubted = asyncio.Event()
        self._asking: asyncio.Task[None] | None = None
        self.resume()

    @property
    def up(self) -> tuple[Worker[C], I] | None:
        """The worker and what it says of itself, if it takes requests."""
        return self._up

    @property
    def idle(self) -> bool:
        """Whether no call of this router runs here."""
        return not any(worker.running for worker in (self._worker, *self._before) if worker is not None)

    def doubt(self, worker: Worker[C]) -> None:
        """A call to it broke: it is asked at once, and is not up before it has answered."""
        if self._up is not None and self._up[0] is worker:
            self._set(None)
            self._doubted.set()

    def resume(self) -> None:
        """Begins to ask, or goes on after `drop`."""
        if self._asking is None:
            self._asking = asyncio.create_task(self._keep_asking())

    def drop(self) -> None:
        """It gets nothing new. What runs there goes on."""
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None
            self._set(None)

    async def close(self) -> None:
        """Ends what runs there too."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        await self._end()

    async def _keep_asking(self) -> None:
        retry = min(FIRST_RETRY, self._beat)
        while True:
            self._doubted.clear()
            try:
                info = await self._ask(timeout=INFO_SECONDS)
            except ChiasmError as error:
                if isinstance(error, DeadlineExceeded) and self._worker is not None:
                    self._worker.silent.set()
                self._set(None)
                wait, retry = retry, min(2 * retry, self._beat)
            else:
                self._set(None if info.draining else info)
                wait, retry = self._beat, min(FIRST_RETRY, self._beat)
            try:
                async with asyncio.timeout(wait):
                    await self._doubted.wait()
            except TimeoutError:
                pass  # it is time to ask again

    def _set(self, info: I | None) -> None:
        before = self._up
        self._up = None
        if info is not None:
            worker = self._worker
            if worker is None or worker.replica_id != info.replica.replica_id or worker.silent.is_set():
                self._before = [past for past in (worker, *self._before) if past is not None and past.running]
                reach = Reach(info.replica.arena_id, info.replica.shared_store_id)
                forms = {model.name: tuple(model.forms) for model in info.models}
                texts = {model.name: getattr(model, "text_fingerprint", b"") for model in info.models}
                worker = Worker(info.replica.replica_id, self._calls, reach=reach, forms=forms, text_fingerprints=texts)
            worker.hear(info.load)
            self._worker = worker
            self._up = (worker, info)
        if (before and before[0]) is not (self._up and self._up[0]):
            self._changed()


class Members(Generic[C, I]):
    """The addresses that names stand for.

    Args:
        names: targets as a channel takes them.
        make: opens a member at an address.
    """

    def __init__(self, names: Sequence[str], make: Callable[[str], Member[C, I]]) -> None:
        self._names = tuple(names)
        self._make = make
        self._members: dict[str, Member[C, I]] = {}

    def up(self) -> Iterator[tuple[Worker[C], I]]:
        """Every worker that takes requests, and what it says of itself."""
        for member in self._members.values():
            if member.up is not None:
                yield member.up

    def doubt(self, worker: object) -> None:
        """As `Member.doubt`, for whichever member it is."""
        for member in self._members.values():
            if member.up is not None and member.up[0] is worker:
                member.doubt(member.up[0])

    async def look_up(self, find: Callable[[str], Awaitable[list[str]]]) -> None:
        """Opens members at new addresses. One that no name stands for any more gets nothing new, and goes when what
        runs there has ended: a name drops a worker that drains long before the worker is done."""
        wanted = {address for name in self._names for address in await find(name)}
        for address in wanted:
            if address in self._members:
                self._members[address].resume()
            else:
                self._members[address] = self._make(address)
        for address in self._members.keys() - wanted:
            self._members[address].drop()
            if self._members[address].idle:
                await self._members.pop(address).close()

    async def close(self) -> None:
        await asyncio.gather(*(member.close() for member in self._members.values()))


async def addresses(name: str) -> list[str]:
    """The targets that a name stands for: each address of `dns:///HOST:PORT`, and any other target itself.

    A name that nobody knows at the moment stands for none.
    """
    scheme, found, rest = name.partition(":///")
    if not found or scheme != "dns":
        return [name]
    host, _, port = rest.rpartition(":")
    loop = asyncio.get_running_loop()
    try:
        answers = await loop.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):  # the latter for labels that no name can have
        return []
    return sorted({_target(str(answer[4][0]), str(answer[4][1])) for answer in answers})


def _target(host: str, port: str) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
