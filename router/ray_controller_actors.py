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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayError

from router.ray_plan import NAMESPACE, Plan, Pool

T = TypeVar("T")

_ACTORS: Final = {
    "encoder": ("encoder_service.actor", "EncoderActor"),
    "decoder": ("decoder_service.actor", "DecoderActor"),
}
"""Named and not imported: the router stands beside the services, and this process is where they meet."""

Gone = ActorDiedError
"""Of an actor that will never answer again."""

Unheard = (RayError, TimeoutError)
"""Of one that did not answer this time."""


class Rank(NamedTuple):
    """What one process of a replica takes: of Ray's resources, and labels of its node."""

    resources: dict[str, float]
    labels: dict[str, str]


def bundles(ranks: Sequence[Rank]) -> list[dict[str, float]]:
    """What a placement group reserves for a replica: one bundle for each rank, to be packed strictly, since ranks
    exchange activations in every layer."""
    return [rank.resources for rank in ranks]


def options(ranks: Sequence[Rank]) -> dict[str, Any]:
    """How Ray places a replica.

    A replica is a list of ranks, and has one today: then the actor's own resources say all that a group of one bundle
    would, and there is no group that could be left behind. Nothing computes in several ranks yet, so nothing asks for
    more; who does will reserve `bundles` with STRICT_PACK and place an actor in each.
    """
    (rank,) = ranks
    own = {name: count for name, count in rank.resources.items() if name not in ("CPU", "GPU")}
    placed: dict[str, Any] = {
        "num_cpus": rank.resources.get("CPU", 0),
        "num_gpus": rank.resources.get("GPU", 0),
        "resources": own,
    }
    if rank.labels:
        placed["label_selector"] = rank.labels
    else:
        placed["scheduling_strategy"] = "SPREAD"
    return placed


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
                **options([Rank(pool.resources, pool.labels)]),
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
            except (ActorDiedError, ActorUnavailableError):
                raise
            except RayActorError as error:  # it never began
                raise ActorDiedError(str(error)) from None

    async def kill(self, actor: Any) -> None:
        """Ends an actor as nothing can prevent, and its worker with it."""
        await self._by_store(lambda: ray.kill(actor, no_restart=True))

    async def _by_store(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._store, work)
