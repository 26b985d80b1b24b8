"""What is done to a running system, by name. Each fault proves that it took effect, or the run fails.

Every one is over when its coroutine returns, but for processes that were killed: those are on their way back, and are
not hurt again before they are ready.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

import redis

from chiasm.cache.ledger import Ledger
from chiasm.cache.records import Extent
from chiasm.cache.region import Region
from tests.faults.injectors import PATIENCE, injected, proved
from tests.faults.injectors.processes import Kill, Stop
from tests.faults.proxy import Proxy
from tests.processes import Role
from tests.redis_server import RedisServer

Fault = Callable[[], Awaitable[None]]

COMING = 300.0
"""Seconds in which a process must be back that was killed, on a machine where everything else is busy too."""

RUN = "from chiasm.cli import main; main()"
"""The command `chiasm`, of this very tree."""


async def retried(act: Callable[[], bool], what: str) -> None:
    """Tries until something was there to hurt, and was hurt."""
    end = time.monotonic() + PATIENCE
    while not await asyncio.to_thread(act):
        proved(time.monotonic() < end, what)
        await asyncio.sleep(0.05)


class ProcessFaults:
    """Of workers and routers, of each of which there are several.

    Attributes:
        encoded: units made by encoders that were killed, as they said last.
    """

    def __init__(
        self, encoders: Sequence[Role], decoders: Sequence[Role], routers: Sequence[Role], draw: random.Random
    ) -> None:
        self._encoders = encoders
        self._routers = routers
        self._roles = {"encoder": encoders, "decoder": decoders, "router": routers}
        self._draw = draw
        self._resumed = 0.0
        self._coming: dict[Role, asyncio.Task[object]] = {}
        self.encoded = 0.0

    @property
    def faults(self) -> Mapping[str, Fault]:
        return {
            f"{role} {how}": partial(self._hurt, act, roles)
            for role, roles in self._roles.items()
            for how, act in (("killed", self._kill), ("stopped", self._stop))
        }

    def may(self, name: str) -> bool:
        """Whether the fault of that name leaves a whole replica of each role: nobody is hurt while another is away."""
        return name not in self.faults or all(task.done() for task in self._coming.values())

    @property
    def resumed(self) -> int:
        """How often a decoder went on with an answer, as far as the routers that were killed had told."""
        return round(self._resumed + sum(map(_resumes, self._routers)))

    async def _hurt(self, act: Callable[[Role], Awaitable[None]], roles: Sequence[Role]) -> None:
        await act(self._draw.choice(roles))

    async def all_back(self) -> None:
        for role in [*self._coming]:
            await self._back(role)

    async def _back(self, role: Role) -> None:
        coming = self._coming.pop(role, None)
        if coming is not None:
            await coming

    async def _kill(self, role: Role) -> None:
        await self._back(role)
        if role in self._encoders:
            self.encoded += (await asyncio.to_thread(role.counted))["chiasm_encoder_units_total:encoded"]
        if role in self._routers:
            self._resumed += await asyncio.to_thread(_resumes, role)
        async with injected(Kill(role.pid)):
            await asyncio.to_thread(role.kill)  # reaps it
        role.start()
        self._coming[role] = asyncio.create_task(asyncio.to_thread(role.wait_for, "ready", seconds=COMING))

    async def _stop(self, role: Role) -> None:
        await self._back(role)
        async with injected(Stop(role.pid)):
            await asyncio.sleep(self._draw.uniform(0.2, 1.5))


def _resumes(router: Role) -> float:
    return router.counted()["chiasm_resumes_total"]


class StoreFaults:
    """Of the server that nodes share, and of the way to it.

    Args:
        link: what the workers reach the server through.
    """

    def __init__(self, server: RedisServer, link: Proxy, draw: random.Random) -> None:
        self._server = server
        self._link = link
        self._draw = draw

    @property
    def faults(self) -> Mapping[str, Fault]:
        return {
            "store killed": self._kill,
            "store stopped": self._freeze,
            "store flushed": self._flush,
            "store keys deleted": lambda: retried(self._delete, "no key was deleted"),
            "store values changed": lambda: retried(self._change, "no value was changed"),
            "store values exchanged": lambda: retried(self._exchange, "no values were exchanged"),
            "store full": self._fill,
            "store evicting": self._evict,
            "link slow": self._slow,
            "link cut": self._cut,
        }

    async def _kill(self) -> None:
        old = self._server.admin.info("server")["run_id"]
        await asyncio.to_thread(self._server.kill)
        proved(not await asyncio.to_thread(self._answers, self._server.url), "a killed server answers")
        await asyncio.sleep(self._draw.uniform(0.1, 1.5))
        await asyncio.to_thread(self._server.start)
        proved(self._server.admin.info("server")["run_id"] != old, "it is the same server")

    async def _freeze(self) -> None:
        await asyncio.to_thread(self._server.freeze)
        try:
            await asyncio.sleep(self._draw.uniform(0.2, 1.2))
            proved(not await asyncio.to_thread(self._answers, self._server.url), "a stopped server answers")
        finally:
            self._server.thaw()

    async def _flush(self) -> None:
        self._server.admin.set("here", "1")
        await asyncio.to_thread(self._server.admin.flushall)
        proved(not self._server.admin.exists("here"), "what was flushed is there")

    def _some(self, pattern: str = "chiasm:*") -> list[str]:
        """Some of the keys there are, in an order of their own."""
        names = self._server.names(pattern)
        return self._draw.sample(names, min(len(names), 1 + len(names) // 3))

    def _delete(self) -> bool:
        names = self._some()
        return bool(names) and bool(self._server.admin.delete(*names))

    def _change(self) -> bool:
        changed = 0
        for name in self._some():
            length = self._server.admin.strlen(name)
            if not length:
                continue
            at, noise = self._draw.randrange(length), self._draw.randbytes(self._draw.randint(1, 8))
            with self._server.admin.pipeline(transaction=True) as pipe:
                pipe.get(name)
                pipe.setrange(name, at, noise)
                pipe.get(name)
                before, _, after = pipe.execute()
            if before is None:  # it went meanwhile, and is no longer there to be spoiled
                self._server.admin.delete(name)
            changed += before not in (None, after)
        return changed > 0

    def _exchange(self) -> bool:
        names = self._some(self._draw.choice(["chiasm:entry:*", "chiasm:value:*"]))
        exchanged = 0
        for one, other in zip(names[::2], names[1::2], strict=False):
            try:
                with self._server.admin.pipeline(transaction=True) as pipe:
                    pipe.mget(one, other)
                    pipe.rename(one, "between")
                    pipe.rename(other, one)
                    pipe.rename("between", other)
                    pipe.mget(other, one)
                    before, *_, after = pipe.execute()
            except redis.ResponseError:  # one of both ended meanwhile
                continue
            exchanged += before == after and before[0] != before[1]
        return exchanged > 0

    async def _fill(self) -> None:
        await asyncio.to_thread(self._set_memory, 1, "noeviction")
        try:
            proved(await asyncio.to_thread(self._refuses), "a full server takes more")
            await asyncio.sleep(self._draw.uniform(0.3, 1.5))
        finally:
            await asyncio.to_thread(self._set_memory, 0, "noeviction")
        proved(not await asyncio.to_thread(self._refuses), "it is still full")

    async def _evict(self) -> None:
        await retried(lambda: bool(self._some()), "nothing is there to be evicted")
        before = self._server.count("evicted_keys")
        used = self._server.count("used_memory")
        await asyncio.to_thread(self._set_memory, used * 3 // 4, "allkeys-lru")
        try:
            await asyncio.to_thread(self._refuses)
            await asyncio.sleep(self._draw.uniform(0.3, 1.5))
            proved(self._server.count("evicted_keys") > before, "nothing was evicted")
        finally:
            await asyncio.to_thread(self._set_memory, 0, "noeviction")

    def _set_memory(self, nbytes: int, policy: str) -> None:
        self._server.admin.config_set("maxmemory-policy", policy)
        self._server.admin.config_set("maxmemory", nbytes)

    def _refuses(self) -> bool:
        try:
            self._server.admin.set("ballast", bytes(1000))
        except redis.OutOfMemoryError:
            return True
        self._server.admin.delete("ballast")
        return False

    async def _slow(self) -> None:
        self._link.delay, self._link.rate = self._draw.choice([(0.05, None), (0.01, 1e5), (0.4, None)])
        try:
            started = time.monotonic()
            proved(await asyncio.to_thread(self._answers, self._link.url, 5.0), "a slow link is no link")
            proved(time.monotonic() - started >= 2 * self._link.delay, "the link is quick")
            await asyncio.sleep(self._draw.uniform(0.3, 1.5))
        finally:
            self._link.delay, self._link.rate = 0.0, None

    async def _cut(self) -> None:
        self._link.broken = True
        try:
            proved(not await asyncio.to_thread(self._answers, self._link.url), "a cut link carries answers")
            await asyncio.sleep(self._draw.uniform(0.2, 1.5))
        finally:
            self._link.broken = False
        proved(await asyncio.to_thread(self._answers, self._link.url, 5.0), "the link stays cut")

    def _answers(self, url: str, seconds: float = 0.1) -> bool:
        client = redis.Redis.from_url(url, protocol=2, socket_timeout=seconds, retry=None)
        try:
            return bool(client.ping())
        except (redis.ConnectionError, redis.TimeoutError):
            return False
        finally:
            client.close()


class RegionFaults:
    """Of the regions of the nodes."""

    def __init__(self, regions: list[Region], draw: random.Random) -> None:
        self._regions = regions
        self._ledgers = [Ledger(region.body) for region in regions]
        self._draw = draw

    @property
    def faults(self) -> Mapping[str, Fault]:
        return {
            "region bytes changed": lambda: retried(self._spoil, "no byte was changed"),
            "region flushed": lambda: retried(self._flush, "nothing was flushed"),
        }

    def _spoil(self) -> bool:
        """Changes bytes of some entries, of payloads as a rule."""
        changed = 0
        for ledger in self._ledgers:
            extents = ledger.extents()
            for extent in self._draw.sample(extents, min(len(extents), 1 + len(extents) // 3)):
                changed += sum(self._spoil_byte(ledger, extent) for _ in range(self._draw.choice([1, 1, 8, 64])))
        return changed > 0

    def _spoil_byte(self, ledger: Ledger, extent: Extent) -> bool:
        size = extent.payload + extent.header + extent.tag
        within = extent.payload if self._draw.random() < 0.8 else size
        if not within:
            return False
        at = extent.start + self._draw.randrange(within)
        before = ledger.data[at]
        ledger.data[at] = before ^ self._draw.randrange(1, 256)
        return bool(ledger.data[at] != before)

    def _flush(self) -> bool:
        """As an operator does it, in a process of its own. What is pinned stays, which may be all there is."""
        place = self._draw.randrange(len(self._regions))
        ledger, path = self._ledgers[place], self._regions[place].path
        before = {extent.generation for extent in ledger.extents()}
        command = [sys.executable, "-c", RUN, "cache", "flush", "--arena", str(path), "--json"]
        told = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
        proved(json.loads(told)["tiers"], "no tier was flushed")
        return bool(before - {extent.generation for extent in ledger.extents()})
