"""`python -m router.ray_controller PLAN`: the driver of a fleet over Ray, in a process of its own.

It is a process of its own because a driver ends when Ray's control store is gone for long, and a router must not. Its
words on standard output are lines of JSON, at every beat and whenever one changes:

    {"encoders": [TARGET…], "decoders": [TARGET…], "asleep": [MODEL…]}

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
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from chiasm import log
from chiasm.settings import SettingsError
from router import ray_plan
from router.ray_plan import Plan

if TYPE_CHECKING:
    from router.ray_controller_actors import Actors
    from router.ray_controller_pool import WorkerPool

REFUSED: Final = 2
_log = logging.getLogger(__name__)


class Controller:
    """Pools, and the one who wants to know where they are."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._waits: dict[str, float] = {}
        self._stop = False
        self._address = ""
        self._changed = asyncio.Event()
        self._pools: list[WorkerPool] = []

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
        """Whether it became a driver before it was to end."""
        while not hearing.done():
            if (address := await asyncio.to_thread(self._plan.where)) is not None:
                connecting = asyncio.ensure_future(asyncio.to_thread(actors.connect, address))
                await asyncio.wait([connecting, hearing], return_when=asyncio.FIRST_COMPLETED)
                if connecting.done():
                    await connecting
                    self._address = address
                    self._take_signals(hearing)
                    _log.info("connected", extra={"ray": address})
                    return True
                return False
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
                _log.info("removed", extra={"worker": str(name), "why": "the fleet has no such pool any more"})
                await actors.kill(actor)
        self._pools = pools
        while not hearing.done():
            if self._plan.where() != self._address:
                raise ConnectionResetError("Ray is elsewhere now")  # the next one finds it
            for pool in pools:
                pool.move(self._waits)
            await asyncio.wait([hearing], timeout=self._plan.beat)
        self._pools = []
        for removed in asyncio.as_completed([pool.close(remove=self._stop) for pool in pools]):
            await removed
        _log.info("controller stopped", extra={"removed": self._stop})

    async def _keep_saying(self) -> None:
        while True:
            self._changed.clear()
            if self._pools:
                self._say()
            else:
                _write({})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._plan.beat):
                    await self._changed.wait()

    def _say(self) -> None:
        _write(
            {
                "encoders": [t for pool in self._pools if pool.pool.role == "encoder" for t in pool.targets()],
                "decoders": [t for pool in self._pools if pool.pool.role == "decoder" for t in pool.targets()],
                "asleep": [pool.pool.model for pool in self._pools if pool.asleep],
            }
        )

    async def _hear(self) -> None:
        """Returns when it is told to stop, or nobody is there any more."""
        async for line in _lines():
            said = json.loads(line)
            self._waits = said.get("waits", {})
            if said.get("stop"):
                self._stop = True
                return


def _write(said: object) -> None:
    with contextlib.suppress(BrokenPipeError):  # its reader is gone, and so will be its input
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()


async def _lines() -> AsyncIterator[bytes]:
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer
    )
    try:
        while line := await reader.readline():
            yield line
    finally:
        transport.close()


def main() -> None:
    """The command. Exit status 2 for a plan that is refused; 1 for whatever ends it by surprise."""
    log.configure("json")
    try:
        plan = ray_plan.read(Path(sys.argv[1]))
    except SettingsError as error:
        _log.error("refused", extra={"what": error.what, "where": error.where})
        sys.exit(REFUSED)
    os.environ.update(ray_plan.environment(plan.auth))
    asyncio.run(Controller(plan).live())
    sys.stdout.flush()
    os._exit(0)  # Ray's own threads may wait for a control store that is gone


if __name__ == "__main__":
    main()
