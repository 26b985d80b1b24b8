"""Ray, as the controller uses it: find actors, place them, ask them, kill them. The only module of the router's that
loads Ray besides the local head, and only processes of their own import it.

Every question has an end in time: an actor that is gone is told so by Ray late, and one that stands still never. What
goes through the control store (placing, finding) is done in one thread of its own, which waits for as long as the store
is gone; calls of actors that are there do not need it.
"""

from __future__ import annotations

import asyncio
import importlib
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from router.ray_plan import NAMESPACE, Plan, Pool

T = TypeVar("T")

_ACTORS: Final = {
    "encoder": ("encoder_service.actor", "EncoderActor"),
    "decoder": ("decoder_service.actor", "DecoderActor"),
}
"""Named and not imported: the router stands beside the services, and this process is where they meet."""

Unheard = (RayError, TimeoutError)
"""Of one that did not answer this time."""


def options(resources: Mapping[str, float], labels: Mapping[str, str]) -> dict[str, Any]:
    """How Ray places a worker: by what it takes, and labels of its node. Without labels, spread over the nodes."""
    placed: dict[str, Any] = {
        "num_cpus": resources.get("CPU", 0),
        "num_gpus": resources.get("GPU", 0),
        "resources": {name: count for name, count in resources.items() if name not in ("CPU", "GPU")},
    }
    if labels:
        placed["label_selector"] = dict(labels)
    else:
        placed["scheduling_strategy"] = "SPREAD"
    return placed


class Gone(Exception):
    """An actor will never answer again."""


@dataclass(frozen=True, slots=True)
class Named:
    """What an actor's name says: whose it is, and with which settings it was started."""

    fleet: str
    kind: str
    print: str
    life: str

    def __str__(self) -> str:
        return f"{self.fleet}:{self.kind}:{self.print}:{self.life}"

    @classmethod
    def of(cls, name: str) -> Named | None:
        parts = name.split(":")
        return cls(*parts) if len(parts) == 4 else None


class Actors:
    """The actors of one fleet. `connect` comes first."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._store = ThreadPoolExecutor(1, thread_name_prefix="control-store")

    def connect(self, address: str) -> None:
        """Becomes a driver. Raises ConnectionError, RayError, RuntimeError."""
        ray.init(
            address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False, ignore_reinit_error=True
        )

    def leave(self) -> None:
        """Ends being a driver. The actors stay."""
        self._store.shutdown(wait=False, cancel_futures=True)
        ray.shutdown()

    async def find(self) -> list[tuple[Named, Any]]:
        """The fleet's actors that are there, with their handles."""

        def found() -> list[tuple[Named, Any]]:
            actors = []
            for listed in ray.util.list_named_actors():
                name = Named.of(listed)
                if name is not None and name.fleet == self._plan.fleet:
                    try:
                        actors.append((name, ray.get_actor(listed, namespace=NAMESPACE)))
                    except ValueError:
                        continue  # it went meanwhile
            return actors

        return await self._by_store(found)

    async def place(self, pool: Pool) -> tuple[Named, Any]:
        """Asks for one more actor. It is there when it answers, and waits for as long as no node has what it takes."""
        module, name_of = _ACTORS[pool.role]
        named = Named(self._plan.fleet, pool.kind, pool.print, secrets.token_hex(4))

        def placed() -> Any:
            kind: Any = ray.remote(getattr(importlib.import_module(module), name_of))
            plan = self._plan
            return kind.options(
                name=str(named),
                namespace=NAMESPACE,
                lifetime="detached",
                max_restarts=0,  # every life is counted, and its restart is this program's
                max_task_retries=0,
                **options(pool.resources, pool.labels),
            ).remote(
                pool.flags,
                host=plan.host,
                arenas=plan.arenas,
                arena_bytes=int(plan.arena_bytes),
                environment=pool.environment,
            )

        return named, await self._by_store(placed)

    async def ask(self, actor: Any, method: str, *, seconds: float) -> Any:
        """Calls an actor. Raises `Gone` or one of `Unheard`."""
        async with asyncio.timeout(seconds):
            try:
                return await getattr(actor, method).remote()
            except ActorUnavailableError:
                raise
            except RayActorError as error:  # it died, or never began
                raise Gone(str(error)) from None

    async def stop(self, actor: Any, *, seconds: float) -> None:
        """Has its worker drain, and returns when that has ended. Raises as `ask`, also after so many seconds."""
        async with asyncio.timeout(seconds):
            report = await self.ask(actor, "stop", seconds=self._plan.silence)
            while report["state"] == "draining":
                await asyncio.sleep(0.05)
                report = await self.ask(actor, "report", seconds=self._plan.silence)

    async def part(self, actor: Any, *, seconds: float) -> bool:
        """Has its worker drain, and removes it. Whether that took no force, which is used after so many seconds."""
        try:
            await self.stop(actor, seconds=seconds)
            await self.ask(actor, "leave", seconds=self._plan.silence)
        except Gone:
            return True  # as it should be; and it needed no control store for that
        except Unheard:
            pass
        await self.kill(actor)
        return False

    async def kill(self, actor: Any) -> None:
        """Ends an actor as nothing can prevent, and its worker with it."""
        await self._by_store(lambda: ray.kill(actor, no_restart=True))

    async def _by_store(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._store, work)
