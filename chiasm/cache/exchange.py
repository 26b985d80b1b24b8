"""One connection to a Redis server: redis-py makes it (TLS, user, password) and packs the commands, hiredis reads the
replies, and values of megabytes go straight to where they are wanted (`chiasm.cache.values`).

One exchange at a time: commands out, as many replies in. Whoever gives one up drops the connection with it, so that a
reply is never read by anybody but who asked. It knows no time and no entry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import hiredis
from redis.asyncio.connection import AbstractConnection

from chiasm.cache.values import Nonsense, TooLong, Values

Command: TypeAlias = Sequence[bytes | str | int | memoryview]

Reply: TypeAlias = Any
"""bytes, int, None, a list of these, or a `Refusal`."""

_READ_BYTES = 64 << 10
"""Of the buffer for all that is not a large value."""

_REPLY_BYTES = 1 << 20
"""Of the replies of one exchange, its large values apart, at most."""


class Refusal(Exception):
    """The server's error in place of a reply, for example `NOPERM …`.

    Attributes:
        kind: its first word.
    """

    @property
    def kind(self) -> str:
        return str(self).partition(" ")[0]


class Exchange(asyncio.BufferedProtocol):
    """A connection, from `connect` to `drop`."""

    def __init__(self, connection: AbstractConnection) -> None:
        self._connection = connection
        # Private, and the only thing here that is: redis-py has no other way to its transport.
        self._transport = cast(asyncio.Transport, connection._writer.transport)  # type: ignore[union-attr]
        self._transport.set_protocol(self)
        self._inbox = memoryview(bytearray(_READ_BYTES))
        self._reader = hiredis.Reader(protocolError=Nonsense, replyError=Refusal)
        self._asked = self._read = 0
        self._values: Values | None = None
        self._replies: list[Reply] = []
        self._done: asyncio.Future[None] | None = None
        self.alive = True

    @classmethod
    async def connect(cls, connection: AbstractConnection) -> Exchange:
        """Raises RedisError, OSError."""
        await connection.connect()
        return cls(connection)

    async def run(self, commands: Sequence[Command], values: Values | None = None) -> list[Reply]:
        """One reply for each command.

        Args:
            values: takes in the reply to the first command, an `MGET`, whose place in the list is then None.

        Raises TooLong, Nonsense, and ConnectionError if the connection is lost.
        """
        if not self.alive or self._transport.is_closing():
            raise ConnectionError("lost")
        self._asked, self._read, self._values, self._replies = len(commands), 0, values, []
        self._done = asyncio.get_running_loop().create_future()
        self._transport.writelines(self._connection.pack_commands(commands))
        await self._done
        return self._replies

    async def drop(self) -> None:
        """Ends it, whatever is still under way."""
        self.alive = False
        self._transport.abort()
        await self._connection.disconnect(nowait=True)

    def get_buffer(self, sizehint: int) -> memoryview:
        wanting = self._values.wanting if self._values is not None else self._inbox[:0]
        return wanting if len(wanting) > _READ_BYTES else self._inbox

    def buffer_updated(self, nbytes: int) -> None:
        if self._values is not None and len(self._values.wanting) > _READ_BYTES:
            self._values.took(nbytes)
            return
        try:
            self._feed(self._inbox[:nbytes])
        except Nonsense as nonsense:
            self._end(nonsense)

    def eof_received(self) -> None:
        """The transport closes then."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(ConnectionError("lost"))

    def _feed(self, data: memoryview) -> None:
        if self._done is None or self._done.done():
            raise Nonsense("a reply that nobody asked for")
        if self._values is not None:
            behind = self._values.feed(data)
            if behind is None:
                return
            if self._values.lengths:
                self._replies.append(None)
            self._values, data = None, behind
        self._read += len(data)
        if self._read > _REPLY_BYTES:
            raise TooLong("more than any reply is")
        self._reader.feed(bytes(data))
        while len(self._replies) < self._asked and (reply := self._reader.gets()) is not False:
            self._replies.append(reply)
        if len(self._replies) == self._asked:
            self._done.set_result(None)

    def _end(self, error: Exception) -> None:
        self.alive = False
        self._transport.abort()
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
            self._done.exception()  # seen, even if who asked has left
