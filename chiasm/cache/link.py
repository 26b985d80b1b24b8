"""One Redis server, reached or not: commands out, replies in, within a time, or nothing.

Every exchange has its own limit, which grows with the bytes that it moves. One that fails is never repeated here, and
its connection is dropped: what else may come on it is nobody's. Some failures in a row, and the server is left alone
until a probe is answered (`chiasm.cache.breaker`). Nothing is ever raised but the caller's own cancellation.

The server may be Redis 7 or Valkey, over TCP, TLS or a socket file, and the user one who may do little. It knows
commands and replies, and no entry.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from redis.asyncio import ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from chiasm.cache.breaker import Breaker
from chiasm.cache.exchange import Command, Exchange, Reply
from chiasm.cache.values import Nonsense, TooLong, Values

_CONNECTIONS = 8
"""Exchanges at a time. Further ones wait, and their time runs."""

FAILURES: Final = ("timeout", "connection", "too_long", "unasked")
"""Why there was no reply: too late, no connection or a broken one, more of it than there was room for, or not asked
because the breaker was open."""


class Server(NamedTuple):
    """Where a server is, and as whom it is asked.

    Attributes:
        url: `redis://[USER@]HOST[:PORT]`, `rediss://…` for TLS, or `unix://[USER@]/path`; without a password.
        password: None where the server asks for none.
        ca_file: of who signed the server's certificate; None for those that the system trusts.
        cert_file, key_file: the client's own certificate, where the server asks for one.
    """

    url: str
    password: str | None = None
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None

    def __repr__(self) -> str:
        return f"Server({self.url!r})"

    def pool(self) -> ConnectionPool:
        """What makes connections to it, and keeps none. Connects nothing yet."""
        options: dict[str, object] = {}
        if urlsplit(self.url).scheme == "rediss":
            options = {
                "ssl_ca_certs": self.ca_file and str(self.ca_file),
                "ssl_certfile": self.cert_file and str(self.cert_file),
                "ssl_keyfile": self.key_file and str(self.key_file),
            }
        return ConnectionPool.from_url(
            self.url,
            password=self.password,
            protocol=2,
            driver_info=None,  # the users that `docs/operations.md` describes may not say what they run
            retry=Retry(NoBackoff(), 0),
            socket_timeout=None,  # the limit of the whole exchange is the only one
            socket_connect_timeout=None,
            **options,
        )


def store_id(url: str, namespace: str) -> bytes:
    """16 bytes that name what processes of the same URL and namespace share, whoever they are to the server."""
    parts = urlsplit(url)
    server = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    return hashlib.blake2b(f"{server}\0{namespace}".encode(), digest_size=16).digest()


class Link:
    """To one server. Belongs to one event loop.

    Args:
        sentinel: a key that a probe asks for; nothing need be there.
        timeout: seconds of an exchange that moves nothing.
        rate: bytes a second, the slowest at which it is worth waiting.
        pause: as of `Breaker`.

    Attributes:
        failures: exchanges without replies, by reason.
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
            self.breaker.failed()
        else:
            self.breaker.succeeded()
        return None if isinstance(replies, str) else replies

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
            async with asyncio.timeout(self._timeout + nbytes / self._rate), self._turns:
                return await self._exchange(commands, values)
        except TimeoutError:
            return "timeout"
        except TooLong:
            return "too_long"
        except (RedisError, OSError, Nonsense):
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
