"""`python -m router.ray_controller PLAN`: the driver of a fleet over Ray, in a process of its own.

It is a process of its own because a driver ends when Ray's control store is gone for long, and a router must not. It
says where workers are (`router.ray_words`) on standard output, at every beat and whenever that changes.

From standard input it hears, in lines of JSON too, `{"waits": {MODEL: SECONDS}}`, and `{"stop": true}`: then it removes
its actors and ends. If its input just ends, or it is killed, the actors stay, and the next one adopts them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from chiasm import log
from chiasm.settings import SettingsError
from router import ray_plan
from router.membership import Hopeless, Role
from router.ray_plan import Plan
from router.ray_words import Told

if TYPE_CHECKING:
    from router.ray_controller_actors import Actors, Named
    from router.ray_controller_pool import WorkerPool

FAILED: Final = 1
REFUSED: Final = 2
LINE_BYTES: Final = 1 << 22

_log = logging.getLogger(__name__)


class Controller:
    """Pools, and the one who wants to know where they are."""

    def __init__(self, plan: Plan, say: Callable[[Told], None]) -> None:
        self._plan = plan
        self._write = say
        self._waits: dict[str, float] = {}
        self._stop = False
        self._address = ""
        self._changed = asyncio.Event()
        self._pools: list[WorkerPool] | None = None
        self._parting: set[asyncio.Task[None]] = set()

    async def live(self) -> None:
        """Until it is told to stop, or its input ends."""
        from router.ray_controller_actors import Actors

        hearing = asyncio.create_task(self._hear())
        actors = Actors(self._plan)
        beating = asyncio.create_task(self._keep_saying())  # so that nobody thinks it hangs
        try:
            if await self._connect(actors, hearing):
                try:
                    await self._serve(actors, hearing)
                finally:
                    actors.leave()
        finally:
            hearing.cancel()
            beating.cancel()

    async def _connect(self, actors: Actors, hearing: asyncio.Task[None]) -> bool:
        """Whether it became a driver before it was to end. One that is to remove the workers becomes one first."""
        while not hearing.done() or self._stop:
            if (address := await asyncio.to_thread(self._plan.where)) is not None:
                connecting = asyncio.ensure_future(asyncio.to_thread(actors.connect, address))
                await asyncio.wait([connecting, hearing], return_when=asyncio.FIRST_COMPLETED)
                if not connecting.done() and not self._stop:
                    return False
                await connecting
                self._address = address
                self._take_signals(hearing)
                _log.info("connected", extra={"ray": address})
                return True
            await asyncio.sleep(0.1)
        return False

    @staticmethod
    def _take_signals(hearing: asyncio.Task[None]) -> None:
        """Ends it as the end of its input does. Ray has put handlers of its own there, which print where it was."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, hearing.cancel)

    async def _serve(self, actors: Actors, hearing: asyncio.Task[None]) -> None:
        from router.ray_controller_pool import WorkerPool

        pools = [WorkerPool(self._plan, pool, actors, self._changed.set) for pool in self._plan.pools]
        by_kind = {pool.pool.kind: pool for pool in pools}
        for name, actor in await actors.find():
            if name.kind in by_kind:
                by_kind[name.kind].adopt(name, actor)
            else:
                parting = asyncio.create_task(self._part(actors, name, actor))
                self._parting.add(parting)
                parting.add_done_callback(self._parting.discard)
        self._pools = pools
        while not hearing.done():
            if self._plan.where() != self._address:
                raise ConnectionResetError("Ray is elsewhere now")  # the next one finds it
            for pool in pools:
                pool.move(self._waits)
            await asyncio.wait([hearing], timeout=self._plan.beat)
        self._pools = None
        closing = [asyncio.ensure_future(pool.close(remove=self._stop)) for pool in pools]
        await asyncio.gather(*closing, *(self._parting if self._stop else ()))
        _log.info("controller stopped", extra={"removed": self._stop})

    async def _part(self, actors: Actors, name: Named, actor: Any) -> None:
        """Of a pool that the fleet has no more: its workers finish what they have, and go."""
        await asyncio.sleep(self._plan.beat)  # the router has heard that they are none of its own any more
        drained = await actors.part(actor, seconds=ray_plan.DRAIN_SECONDS + self._plan.drain)
        _log.info("removed", extra={"worker": str(name), "why": "the fleet has no such pool", "drained": drained})

    async def _keep_saying(self) -> None:
        while True:
            self._changed.clear()
            self._say()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._plan.beat):
                    await self._changed.wait()

    def _say(self) -> None:
        if self._pools is None:
            self._write(Told())
            return
        targets: dict[Role, list[str]] = {"encoder": [], "decoder": []}
        for pool in self._pools:
            targets[pool.pool.role] += pool.targets()
        asleep = frozenset(pool.pool.model for pool in self._pools if pool.asleep)
        self._write(Told(targets, asleep, _hopeless(self._pools)))

    async def _hear(self) -> None:
        """Returns when it is told to stop, or nobody is there any more."""
        async for line in _lines():
            said = json.loads(line)
            self._waits = said.get("waits", {})
            if said.get("stop"):
                self._stop = True
                return


def _hopeless(pools: Sequence[WorkerPool]) -> tuple[Hopeless, ...]:
    """Why no model will be served. Nothing as long as one may be: the others are tried on and on beside it."""
    given_up = {pool.pool.model: pool.hopeless for pool in pools if pool.hopeless is not None}
    return tuple(given_up.values()) if all(pool.pool.model in given_up for pool in pools) else ()


def _own_output() -> Callable[[Told], None]:
    """The way to the router. Whatever else is printed here, by any library, goes where the log goes."""
    way = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(told: Told) -> None:
        with contextlib.suppress(BrokenPipeError):  # its reader is gone, and so will be its input
            way.write(told.line() + "\n")
            way.flush()

    return say


async def _lines() -> AsyncIterator[bytes]:
    reader = asyncio.StreamReader(limit=LINE_BYTES)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer
    )
    try:
        while line := await reader.readline():
            yield line
    finally:
        transport.close()


async def _to_the_end(plan: Plan) -> NoReturn:
    """Nobody waits for threads, Ray's or ours: they may wait for a control store that is gone."""
    try:
        await Controller(plan, _own_output()).live()
    except Exception:
        _log.exception("failed")
        os._exit(FAILED)
    os._exit(0)


def main() -> None:
    """The command. Exit status 2 for a plan that is refused; 1 for whatever ends it by surprise."""
    log.configure("json")
    try:
        plan = ray_plan.read(Path(sys.argv[1]))
    except SettingsError as error:
        _log.error("refused", extra={"what": error.what, "where": error.where})
        sys.exit(REFUSED)
    os.environ.update(ray_plan.environment(plan.auth))
    asyncio.run(_to_the_end(plan))


if __name__ == "__main__":
    main()
