"""A pool of workers over actors that a script plays: what starts, what is given up, what is removed, and why."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, cast

import pytest

from chiasm.errors import ConnectionFailed
from router.awake import Awake
from router.membership import Hopeless
from router.ray_controller import _hopeless
from router.ray_controller_actors import Actors, Gone, Named
from router.ray_controller_pool import WorkerPool
from router.ray_plan import Plan, Pool
from tests.waiting import until

BEAT = 0.01
POOL = Pool(role="encoder", flags={"model": "digits", "drain-seconds": "0"})
TAIL = ["starting", "error: no such model", "  where  --model", "  fix    name another"]


class Actor:
    """One that does as it is told, unless it is made otherwise."""

    def __init__(self) -> None:
        self.state = "resting"
        self.asked: list[str] = []
        self.becomes = "ready"
        self.code: int | None = None
        self.drains = True
        self.silent = False
        self.dead = False

    async def call(self, method: str) -> dict[str, Any]:
        self.asked.append(method)
        if self.silent:
            await asyncio.Event().wait()
        if self.dead:
            raise Gone("it is gone")
        if method == "start":
            self.state = self.becomes
        elif method == "stop" and self.state != "resting":
            self.state = "resting" if self.drains else "draining"
        elif method == "leave":
            self.dead = True
            raise Gone("it has left")
        return {
            "state": self.state,
            "target": "127.0.0.1:1" if self.state == "ready" else "",
            "pid": 1,
            "code": self.code,
            "node": "n",
            "tail": TAIL if self.state == "ended" else [],
        }


class Script(Actors):
    """`Actors` without Ray.

    Attributes:
        placed, killed: so far.
        make: what the next actor is.
    """

    def __init__(self, plan: Plan, make: Callable[[], Actor] = Actor) -> None:
        self._plan = plan
        self.make = make
        self.placed: list[Actor] = []
        self.killed: list[Actor] = []

    async def place(self, pool: Pool) -> tuple[Named, Any]:
        actor = self.make()
        self.placed.append(actor)
        return Named("fleet", pool.kind, pool.print, f"{len(self.placed):08x}"), actor

    async def ask(self, actor: Any, method: str, *, seconds: float) -> Any:
        async with asyncio.timeout(seconds):
            return await cast(Actor, actor).call(method)

    async def kill(self, actor: Any) -> None:
        actor.dead = True
        self.killed.append(actor)


class Moving:
    """A pool that moves at every beat while the block runs."""

    def __init__(self, pool: Pool = POOL, make: Callable[[], Actor] = Actor, **more: Any) -> None:
        times = {"beat": BEAT, "silence": 0.3, "first_delay": 0.0, "longest_delay": 0.0, "drain": 0.1, **more}
        self.plan = Plan(address="a:1", pools=(pool,), **times)
        self.actors = Script(self.plan, make)
        self.pool = WorkerPool(self.plan, pool, self.actors, lambda: None)
        self.waits: dict[str, float] = {}
        self.removes = True

    async def __aenter__(self) -> Moving:
        self._task = asyncio.create_task(self._move())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.pool.close(remove=self.removes)

    async def until(self, holds: Callable[[], bool]) -> None:
        await until(lambda: holds() or self._task.done(), seconds=20)
        if self._task.done():
            await self._task
        assert holds()

    async def _move(self) -> None:
        while True:
            self.pool.move(self.waits)
            await asyncio.sleep(BEAT)


@pytest.fixture(autouse=True)
def answering(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Workers say who they are, without a channel, unless their target is put into the set."""
    mute: set[str] = set()

    class Info:
        def __init__(self, target: str) -> None:
            self.target = target

        async def info(self, *, timeout: float) -> Any:  # noqa: ASYNC109
            from chiasm.rpc.v1 import encoder_pb2 as epb

            if self.target in mute:
                raise ConnectionFailed("nobody listens")
            return epb.EncoderInfoResponse()

        async def close(self) -> None:
            pass

    monkeypatch.setattr("router.ray_controller_worker.RemoteEncoder", Info)
    return mute


async def test_a_pool_starts_its_worker_and_removes_it_at_the_end() -> None:
    async with Moving() as moving:
        await moving.until(lambda: [*moving.pool.targets()] == ["127.0.0.1:1"])
    (actor,) = moving.actors.placed
    assert actor.dead and not moving.actors.killed and actor.asked[-2:] == ["stop", "leave"]


async def test_workers_that_are_kept_are_not_told_anything() -> None:
    async with Moving() as moving:
        await moving.until(lambda: [*moving.pool.targets()] != [])
        moving.removes = False
    (actor,) = moving.actors.placed
    assert not actor.dead and {*actor.asked} == {"start", "report"}


async def test_a_worker_whose_process_cannot_be_started_is_replaced() -> None:
    made: list[Actor] = []

    class Broken(Actor):
        async def call(self, method: str) -> dict[str, Any]:
            if method == "start" and len(made) == 1:
                raise TimeoutError("no folder")
            return await super().call(method)

    def make() -> Actor:
        made.append(Broken())
        return made[-1]

    async with Moving(make=make) as moving:
        await moving.until(lambda: [*moving.pool.targets()] != [])
        assert moving.actors.killed == made[:1] and len(made) == 2


async def test_a_worker_that_is_starting_for_too_long_is_replaced() -> None:
    made: list[Actor] = []

    def make() -> Actor:
        made.append(Actor())
        made[-1].becomes = "starting" if len(made) == 1 else "ready"
        return made[-1]

    async with Moving(make=make, start=0.1) as moving:
        await moving.until(lambda: [*moving.pool.targets()] != [])
        assert moving.actors.killed == made[:1]


async def test_a_worker_that_waits_for_a_node_is_waited_for_with_one_question() -> None:
    waiting = asyncio.Event()

    class Waiting(Actor):
        async def call(self, method: str) -> dict[str, Any]:
            self.asked.append(method)
            await waiting.wait()
            return await super().call(method)

    async with Moving(make=Waiting, silence=0.05, start=0.05) as moving:
        await moving.until(lambda: len(moving.actors.placed) == 1)
        await asyncio.sleep(20 * BEAT)
        assert moving.actors.placed[0].asked == ["start"]
        waiting.set()
        await moving.until(lambda: [*moving.pool.targets()] != [])
    assert len(moving.actors.placed) == 1 and not moving.actors.killed


async def test_a_worker_that_does_not_end_when_it_is_to_go_is_ended() -> None:
    async with Moving() as moving:
        await moving.until(lambda: [*moving.pool.targets()] != [])
        moving.actors.placed[0].drains = False
        asking = asyncio.create_task(moving.pool._end(*moving.pool._workers.values(), seconds=0.1, parting=0.0))
        await asyncio.wait_for(asking, 10)
        assert moving.actors.killed == moving.actors.placed[:1]


async def test_a_worker_that_does_not_end_when_it_is_to_rest_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.ray_controller_pool.PARTING", 0.0)
    stubborn = Actor()
    stubborn.drains = False
    pool = POOL.model_copy(update={"least": 0, "scale_calm": 0.1})
    async with Moving(pool, make=lambda: stubborn) as moving:
        await moving.until(lambda: moving.actors.killed == [stubborn])
        assert moving.pool.asleep


async def test_a_pool_rests_and_the_first_who_waits_wakes_the_same_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.ray_controller_pool.PARTING", 0.0)
    pool = POOL.model_copy(update={"least": 0, "scale_calm": 0.1})
    async with Moving(pool) as moving:
        await moving.until(lambda: [worker.state for worker in moving.pool._workers.values()] == ["resting"])
        assert moving.pool.asleep and [*moving.pool.targets()] == []
        moving.waits = {"digits": 0.5}
        await moving.until(lambda: [*moving.pool.targets()] != [])
        assert len(moving.actors.placed) == 1 and moving.actors.placed[0].asked.count("start") == 2


@pytest.mark.parametrize(("code", "deaths"), [(2, 1), (1, 3), (-9, 3)])
async def test_a_pool_whose_workers_die_before_one_is_ready_says_why(code: int, deaths: int) -> None:
    """One that was asked for what cannot be does so at once."""

    def make() -> Actor:
        actor = Actor()
        actor.becomes, actor.code = "ended", code
        return actor

    async with Moving(make=make) as moving:
        await moving.until(lambda: moving.pool.hopeless is not None)
        assert len(moving.actors.killed) >= deaths
        assert moving.pool.hopeless == ("no such model", "encoder digits · --model", "name another")


async def test_nobody_is_told_of_hopeless_pools_as_long_as_another_model_may_be_served() -> None:
    why = Hopeless("what", "where", "fix")
    plan = Plan(
        address="a:1",
        pools=tuple(Pool(role=role, flags={"model": m}) for m in ("one", "two") for role in ("encoder", "decoder")),
    )
    pools = [WorkerPool(plan, pool, Script(plan), lambda: None) for pool in plan.pools]
    pools[0].hopeless = pools[1].hopeless = why
    assert _hopeless(pools) == ()
    pools[3].hopeless = why
    assert _hopeless(pools) == (why, why)


async def test_a_pool_that_served_once_is_never_given_up(caplog: pytest.LogCaptureFixture) -> None:
    made: list[Actor] = []

    def make() -> Actor:
        made.append(Actor())
        if len(made) > 1:
            made[-1].becomes, made[-1].code = "ended", 2
        return made[-1]

    async with Moving(make=make) as moving:
        await moving.until(lambda: [*moving.pool.targets()] != [])
        made[0].dead = True
        await moving.until(lambda: len(made) > 6)
        assert moving.pool.hopeless is None


async def test_an_actor_that_stands_still_is_killed_also_if_it_was_adopted() -> None:
    async with Moving() as moving:
        silent = Actor()
        silent.silent = True
        moving.pool.adopt(Named("fleet", POOL.kind, POOL.print, "found"), silent)
        await moving.until(lambda: moving.actors.killed == [silent])
        await moving.until(lambda: [*moving.pool.targets()] != [])


async def test_a_worker_that_does_not_say_who_it_is_is_killed(answering: set[str]) -> None:
    async with Moving() as moving:
        await moving.until(lambda: [*moving.pool.targets()] != [])
        answering.add("127.0.0.1:1")
        await moving.until(lambda: moving.actors.killed != [])


async def test_a_controller_that_stood_still_takes_nobody_for_dead(caplog: pytest.LogCaptureFixture) -> None:
    class Clock:
        """A real one, and the pauses that it is told of."""

        past = 0.0

        def __call__(self) -> float:
            return asyncio.get_event_loop().time() + self.past

    clock = Clock()
    awake = Awake(2 * BEAT, clock)
    before = awake.now()
    clock.past = 3600.0
    assert awake.now() - before <= 2 * BEAT


async def test_a_controller_that_begins_anew_keeps_as_many_workers_as_it_finds() -> None:
    pool = POOL.model_copy(update={"most": 4})
    async with Moving(pool) as moving:
        for number in range(3):
            actor = Actor()
            actor.state = "ready"
            moving.pool.adopt(Named("fleet", pool.kind, pool.print, str(number)), actor)
        await moving.until(lambda: len([*moving.pool.targets()]) == 3)
        await asyncio.sleep(10 * BEAT)
        assert len([*moving.pool.targets()]) == 3 and not moving.actors.placed


async def test_a_worker_that_was_being_drained_when_it_was_adopted_is_seen_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.ray_controller_pool.PARTING", 0.0)
    async with Moving() as moving:
        stuck = Actor()
        stuck.state, stuck.drains = "draining", False
        moving.pool.adopt(Named("fleet", POOL.kind, POOL.print, "found"), stuck)
        await moving.until(lambda: moving.actors.killed == [stuck])
        await moving.until(lambda: [*moving.pool.targets()] != [])


async def test_a_fault_that_nobody_foresaw_ends_the_controller_and_no_worker(caplog: pytest.LogCaptureFixture) -> None:
    class Strange(Actor):
        async def call(self, method: str) -> dict[str, Any]:
            return {} if method == "report" else await super().call(method)

    moving = Moving(make=Strange)
    moving.removes = False
    with caplog.at_level(logging.WARNING), pytest.raises(KeyError):
        async with moving:
            await moving.until(lambda: False)
    assert not moving.actors.killed


async def test_a_control_store_that_refuses_to_place_is_asked_again_later() -> None:
    async with Moving() as moving:
        place, refused = moving.actors.place, [ValueError("no"), TimeoutError()]

        async def placing(pool: Pool) -> tuple[Named, Any]:
            if refused:
                raise refused.pop()
            return await place(pool)

        moving.actors.place = placing  # type: ignore[method-assign]
        await moving.until(lambda: [*moving.pool.targets()] != [])
        assert not refused
