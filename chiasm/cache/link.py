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
from typing import Any, Final, NamedTuple, TypeAlias
from urllib.parse import urlsplit

from redis.asyncio import ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from chiasm.cache.breaker import Breaker

Command: TypeAlias = Sequence[bytes | str | int | memoryview]

Reply: TypeAlias = Any
"""bytes, int, None, a list of these, or a `ResponseError`: the server's refusal of one command."""

_READ_BYTES = 256 << 10
"""Asked of the socket at a time: the least from which larger pieces gain nothing."""

_CONNECTIONS = 8
"""Exchanges at a time. Further ones wait, and their time runs."""

FAILURES: Final = ("timeout", "connection", "unasked")
"""Why there was no reply: too late, no connection or a broken one, or not asked because the breaker was open."""


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
        """Connects nothing yet."""
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
            socket_read_size=_READ_BYTES,
            max_connections=_CONNECTIONS,
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
        self._free = asyncio.Semaphore(_CONNECTIONS)
        self.breaker = Breaker(self._answers, pause=pause)
        self.failures: Counter[str] = Counter(dict.fromkeys(FAILURES, 0))

    async def ask(self, *commands: Command, nbytes: int = 0) -> list[Reply] | None:
        """The replies, one for each command; None if they did not all come in time.

        Args:
            nbytes: that are moved, either way.
        """
        if not self.breaker.closed:
            self.failures["unasked"] += 1
            return None
        if not commands:
            return []
        replies = await self._try(commands, nbytes)
        if replies is None:
            self.breaker.failed()
        else:
            self.breaker.succeeded()
        return replies

    async def close(self) -> None:
        await self.breaker.close()
        await self._pool.aclose()

    async def _answers(self) -> bool:
        """A refusal is an answer: what the user may not do does not hang. `PING` is what most users may not."""
        return await self._try([("GET", self._sentinel)], 0) is not None

    async def _try(self, commands: Sequence[Command], nbytes: int) -> list[Reply] | None:
        try:
            async with asyncio.timeout(self._timeout + nbytes / self._rate), self._free:
                return await self._exchange(commands)
        except TimeoutError:
            self.failures["timeout"] += 1
        except (RedisError, OSError, RuntimeError):  # uvloop's, of a transport that was closed a moment ago
            self.failures["connection"] += 1
        return None

    async def _exchange(self, commands: Sequence[Command]) -> list[Reply]:
        connection = await self._pool.get_connection()
        try:
            await connection.send_packed_command(connection.pack_commands(commands), check_health=False)
            replies: list[Reply] = []
            for _ in commands:
                try:
                    replies.append(await connection.read_response(disable_decoding=True))
                except ResponseError as refusal:
                    replies.append(refusal)
            return replies
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        finally:
            await asyncio.shield(self._pool.release(connection))
