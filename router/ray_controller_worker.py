"""What a controller knows of one worker over Ray, and what it asks the worker itself."""

from __future__ import annotations

import asyncio
from typing import Any

from chiasm.errors import ChiasmError
from router.awake import Awake
from router.membership import Role
from router.ray_controller_actors import Named
from router.remote import RemoteDecoder, RemoteEncoder
from router.rolling import Standing, State


class Worker:
    """An actor that is watched, from its placing or its finding to its end.

    Args:
        awake: the clock of what follows.
        adopted: it was found, so nobody here knows what it was told before.

    Attributes:
        state: as `rolling` has it.
        target: what a channel to it takes; empty while it takes no calls.
        running, oldest_wait: as it said last.
        leaving: it drains, or is about to.
        goes: and does not rest then.
        since: when it came into its state.
        ready_since: when it was ready; None before.
        heard, said: when its actor answered last, and when it did itself.
        placed: set when its actor has answered. One that is new may wait for a node that has room until then.
    """

    def __init__(self, name: Named, actor: Any, awake: Awake, *, adopted: bool = False) -> None:
        self.name = name
        self.actor = actor
        self.adopted = adopted
        self.state: State = "starting"
        self.target = ""
        self.running = 0
        self.oldest_wait = 0.0
        self.leaving = False
        self.goes = False
        self.since = self.heard = self.said = awake.now()
        self.ready_since: float | None = None
        self.placed = asyncio.Event()
        self.watching: asyncio.Task[None] | None = None
        self.ending: asyncio.Task[None] | None = None
        self._awake = awake
        self._way: RemoteEncoder | RemoteDecoder | None = None

    @property
    def takes_calls(self) -> bool:
        return self.state == "ready" and not self.leaving

    def standing(self, fingerprint: str) -> Standing:
        """As it stands in a pool whose settings have that fingerprint."""
        drains = self.goes or (self.leaving and self.state != "resting")
        state = "draining" if drains else self.state
        return Standing(str(self.name), state, self.name.print == fingerprint, self.running)

    def become(self, state: State, target: str) -> None:
        """It is in another state, or elsewhere."""
        now = self._awake.now()
        if state != self.state:
            self.since = now
            if state == "ready":
                self.ready_since = self.said = now
        self.state, self.target = state, target

    async def ask(self, role: Role, target: str, *, seconds: float) -> None:
        """Asks it who it is, as the router does. One that does not answer has not said so."""
        if self._way is None or self._way.target != target:
            await self.close()
            self._way = RemoteEncoder(target) if role == "encoder" else RemoteDecoder(target)
        try:
            info = await self._way.info(timeout=seconds)
        except ChiasmError:
            return
        self.said = self._awake.now()
        self.running = info.load.running + info.load.waiting
        self.oldest_wait = info.load.oldest_wait.ToTimedelta().total_seconds()

    async def close(self) -> None:
        """Closes the way to it."""
        if self._way is not None:
            await self._way.close()
            self._way = None
