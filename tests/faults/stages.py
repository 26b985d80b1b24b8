"""A system in one process whose stages can be stopped and are counted, one by one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from chiasm.local import LocalService
from tests.waiting import until


class Stage:
    """One stage of a request.

    Attributes:
        entered: how often it has begun.
        left: how often it has ended.
    """

    def __init__(self) -> None:
        self.entered = 0
        self.left = 0
        self._hold_at: int | None = None
        self._open = threading.Event()
        self._open.set()

    def hold(self, at: int = 1) -> None:
        """Stops it when it begins for the `at`-th time from now on, until `go_on`."""
        self._hold_at = self.entered + at
        self._open.clear()

    def go_on(self) -> None:
        self._hold_at = None
        self._open.set()

    @property
    def held(self) -> bool:
        return self._hold_at is not None and self.entered >= self._hold_at

    async def reached(self) -> None:
        await until(lambda: self.held)

    def in_thread(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def staged(*args: Any, **kwargs: Any) -> Any:
            self.entered += 1
            if self.held:
                assert self._open.wait(60)
            try:
                return function(*args, **kwargs)
            finally:
                self.left += 1

        return staged

    def in_loop(self, function: Callable[..., Any]) -> Callable[..., Any]:
        async def staged(*args: Any, **kwargs: Any) -> Any:
            self.entered += 1
            try:
                if self.held:
                    await until(self._open.is_set)
                return await function(*args, **kwargs)
            finally:
                self.left += 1

        return staged


class Stages:
    """Of a service: what opens media, what computes on either device, what puts and reads entries."""

    def __init__(self, service: LocalService) -> None:
        self.sandbox, self.encode, self.put, self.get, self.step = (Stage() for _ in range(5))
        parts: Any = service
        parts.sandbox.probe = self.sandbox.in_loop(parts.sandbox.probe)
        parts.encoder.device._pass = self.encode.in_thread(parts.encoder.device._pass)
        parts.store.put = self.put.in_loop(parts.store.put)
        parts.store.get = self.get.in_loop(parts.store.get)
        parts.decoder.engine.step = self.step.in_thread(parts.decoder.engine.step)

    def hold(self, name: str) -> Stage:
        """Stops where a request is at that stage."""
        stage: Stage = self.step if name in ("prefill", "decode") else getattr(self, name)
        stage.hold(4 if name == "decode" else 1)
        return stage

    @property
    def entered(self) -> dict[str, int]:
        return {name: stage.entered for name, stage in vars(self).items()}


async def idle() -> None:
    """Lets everything run that is ready to."""
    for _ in range(20):
        await asyncio.sleep(0)
