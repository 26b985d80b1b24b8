"""One Redis server, reached or not: commands out, replies in, within a time, or nothing.

Every exchange has its own limit, which grows with the bytes that it moves. One that fails is never repeated here, and
its connection is dropped: what else may come on it is nobody's. Some failures in a row, and the server is left alone
until a probe is answered (`chiasm.cache.breaker`). Nothing is ever raised but the caller's own cancellation.
It knows commands and replies, and no entry.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Final

from redis.exceptions import RedisError

from chiasm.cache.breaker import Breaker
from chiasm.cache.exchange import Command, Exchange, Reply
from chiasm.cache.server import Server
from chiasm.cache.values import Nonsense, TooLong, Values

_CONNECTIONS = 8
"""Exchanges at a time. Further ones wait, and their time runs."""

_log = logging.getLogger(__name__)

FAILURES: Final = ("timeout", "connection", "too_long", "unasked")
"""Why there was no reply: too late, no connection or a broken one, more of it than there was room for, or not asked
because the breaker was open."""


class Link:
    """To one server. Belongs to one event loop.

    Args:
        sentinel: a key that a probe asks for; nothing need be there.
        timeout: seconds of an exchange that moves nothing.
        rate: bytes a second, the slowest at which it is worth waiting.
        pause: as of `Breaker`.

    Attributes:
        failures: exchanges without replies, by reason.
        trouble: in words, why the last of them brought none, or what was refused last. For people: it may be the text
            of a library.
    """

    def __init__(
        self, server: Server, *, sentinel: str, timeout: float = 0.25, rate: float = 50e6, pause: float = 0.25
    ) -> None:
        self._pool = server.pool()
        self._sentinel = sentinel
        self._timeout = timeout
        self._rate = rate
        self._turns = asyncio.Semaphore(_CONNECTIONS)
        self._idle: list[Exchange] = []
        self.breaker = Breaker(self._answers, pause=pause)
        self.failures: Counter[str] = Counter(dict.fromkeys(FAILURES, 0))
        self.trouble = ""

    async def ask(self, *commands: Command, nbytes: int = 0, values: Values | None = None) -> list[Reply] | None:
        """The replies, one for each command; None if they did not all come in time.

        Args:
            nbytes: that are moved, either way.
            values: as of `Exchange.run`.
        """
        if not self.breaker.closed:
            self.failures["unasked"] += 1
            return None
        if not commands:
            return []
        replies = await self._try(commands, nbytes, values)
        if isinstance(replies, str):
            self.failures[replies] += 1
        if isinstance(replies, str) and replies != "too_long":
            if self.breaker.failed():
                _log.warning(
                    "the shared store is left alone until it answers", extra={"why": replies, "trouble": self.trouble}
                )
        else:
            self.breaker.succeeded()
        return None if isinstance(replies, str) else replies

    def limit(self, nbytes: int) -> float:
        """Seconds that an exchange may take that moves so many bytes."""
        return self._timeout + nbytes / self._rate

    async def close(self) -> None:
        await self.breaker.close()
        while self._idle:
            await self._idle.pop().drop()

    async def _answers(self) -> bool:
        """A refusal is an answer: what the user may not do does not hang. `PING` is what most users may not."""
        return not isinstance(await self._try([("GET", self._sentinel)], 0, None), str)

    async def _try(self, commands: Sequence[Command], nbytes: int, values: Values | None) -> list[Reply] | str:
        """The replies, or which of `FAILURES` it was."""
        try:
            async with asyncio.timeout(self.limit(nbytes)), self._turns:
                return await self._exchange(commands, values)
        except TimeoutError:
            self.trouble = "no answer in time"
            return "timeout"
        except TooLong as error:
            self.trouble = str(error)
            return "too_long"
        except (RedisError, OSError, Nonsense) as error:
            self.trouble = str(error) or type(error).__name__
            return "connection"

    async def _exchange(self, commands: Sequence[Command], values: Values | None) -> list[Reply]:
        exchange = await self._connected()
        try:
            replies = await exchange.run(commands, values)
        except BaseException:
            await exchange.drop()
            raise
        self._idle.append(exchange)
        return replies

    async def _connected(self) -> Exchange:
        """The connection that was used last, or a new one."""
        while self._idle:
            exchange = self._idle.pop()
            if exchange.alive:
                return exchange
            await exchange.drop()
        return await Exchange.connect(self._pool.make_connection())
