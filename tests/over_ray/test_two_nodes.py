"""Client → router → actors on two Ray nodes → entries through the store that both share: right answers, and still right
ones when an actor, the controller, Ray's control store or a whole node is gone."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import pytest

from chiasm import AsyncClient, Video
from chiasm.client import Content, Token
from chiasm.models.finding import SHIPPED
from tests import checkpoints_tiny, digits
from tests.e2e.test_digits import drawn
from tests.over_ray.clusters import Asking, Served, kill, parent, pool, read_right, settled
from tests.waiting import gone, until

pytestmark = pytest.mark.timeout(240)  # the first of them starts two nodes and loads two models


async def test_digits_are_read_through_actors_of_two_nodes_and_what_was_visible_is_told(served: Served) -> None:
    await settled(served)
    assert served.worker("encoder")["node"] != served.worker("decoder")["node"]
    frames, shown = drawn(np.random.default_rng(3), 5)
    async with AsyncClient(served.target) as client:
        asked: Content = [Video(digits.clip(frames)), "Read the digits."]
        events = [event async for event in client.stream("digits", asked, max_tokens=24)]
    tokens = [event for event in events if isinstance(event, Token)]
    assert "".join(event.text for event in tokens) == " ".join(map(str, shown))
    assert {event.visible for event in tokens if event.ids} == {5}
    assert len(served.store.names("chiasm:entry:*")) >= 5


@pytest.mark.parametrize(
    ("role", "which"),
    [("encoder", "actor"), pytest.param("decoder", "process", marks=pytest.mark.chaos)],
)
async def test_a_worker_whose_actor_or_process_is_killed_is_replaced_and_answers_go_on(
    served: Served, role: str, which: str
) -> None:
    await settled(served)
    before = served.worker(role)
    kill(parent(before["pid"]) if which == "actor" else before["pid"])
    await gone(before["pid"])
    await read_right(served.target)
    await settled(served)
    assert served.worker(role)["worker"] != before["worker"]


@pytest.mark.parametrize("which", [pytest.param("actor", marks=pytest.mark.chaos), "process"])
async def test_a_worker_that_stands_still_is_killed_and_replaced(served: Served, which: str) -> None:
    await settled(served)
    before = served.worker("encoder")
    actor = parent(before["pid"])
    os.kill(actor if which == "actor" else before["pid"], signal.SIGSTOP)
    await read_right(served.target)
    await gone(before["pid"], actor)
    await settled(served)
    assert served.worker("encoder")["worker"] != before["worker"]


async def test_requests_go_on_without_controller_and_control_store_and_when_both_are_back_with_the_same_workers(
    served: Served,
) -> None:
    """The store reads what it knew from its Redis; the next controller waits for it, and adopts who is there."""
    await settled(served)
    before, was = {role: served.worker(role) for role in ("encoder", "decoder")}, served.controller
    adopted, died = len(served.said("adopted")), len(served.said("died"))
    async with Asking(served.target) as asking:
        served.nodes.kill_control_store()
        await asking.more()
        kill(was)
        await until(lambda: served.controller != was)
        await asking.more()
        served.nodes.start_control_store()
        await until(lambda: len(served.said("adopted")) == adopted + 2, seconds=100)
        await asking.more()
    assert {line["worker"] for line in served.said("adopted")[adopted:]} == {w["worker"] for w in before.values()}
    assert {role: served.worker(role)["pid"] for role in before} == {role: w["pid"] for role, w in before.items()}
    assert len(served.said("died")) == died


async def test_new_settings_come_to_one_worker_after_another_and_no_request_fails(
    served: Served,
) -> None:
    """The next controller reads the plan anew; what it finds running otherwise it replaces."""
    await settled(served)
    before = {role: served.worker(role)["worker"] for role in ("encoder", "decoder")}
    served.flags["max-units"] = "16"
    served.write([pool(role, served.folder, flags=served.flags) for role in before])
    async with Asking(served.target) as asking:
        kill(served.controller)
        for role in before:
            await until(lambda role=role: before[role] not in served.serving(role), seconds=60)  # type: ignore[misc]
        await asking.more()
    await settled(served)
    for role, name in before.items():
        drained = [line["event"] for line in served.router.events() if line.get("worker") == name][-1]
        assert drained == "removed"
        assert served.worker(role)["worker"] != name


async def test_the_workers_of_a_node_that_is_lost_are_replaced_on_another(served: Served) -> None:
    await settled(served)
    nodes = served.nodes
    was = served.worker("encoder")
    lost = next(node for node in nodes.nodes.worker_nodes if node.node_id == was["node"])
    await asyncio.to_thread(nodes.add, encoder=4)
    async with Asking(served.target) as asking:
        await asyncio.to_thread(nodes.remove, lost)
        await gone(was["pid"])
        await asking.more()
    await settled(served)
    assert served.worker("encoder")["node"] != was["node"]


@pytest.mark.chaos
async def test_a_pool_grows_while_calls_wait_then_shrinks_then_rests_and_is_woken_by_a_request(served: Served) -> None:
    await settled(served)
    scale = {"least": 0, "most": 2, "scale_patience": 0.0, "scale_settle": 0.5, "scale_calm": 5.0}
    flags = {**served.flags, "max-running": "1"}
    served.write(
        [
            pool("encoder", served.folder, flags=flags, **scale),
            pool("decoder", served.folder, flags=served.flags),
        ]
    )
    kill(served.controller)
    async with AsyncExitStack() as many:
        for _ in range(6):
            await many.enter_async_context(Asking(served.target))
        await until(lambda: len(served.serving("encoder")) == 2, seconds=100)
    await until(lambda: len(served.said("worker resting", "encoder")) > 0, seconds=100)
    resting = served.said("worker resting", "encoder")[-1]["worker"]
    await until(lambda: not served.serving("encoder"))
    await read_right(served.target)
    assert [*served.serving("encoder")] == [resting]
    served.write([pool(role, served.folder, flags=served.flags) for role in ("encoder", "decoder")])
    kill(served.controller)
    await until(lambda: resting not in served.serving("encoder"), seconds=60)
    await settled(served)


@pytest.mark.chaos
async def test_a_pool_that_the_plan_drops_is_drained_and_removed(served: Served) -> None:
    await settled(served)
    both = [pool(role, served.folder, flags=served.flags) for role in ("encoder", "decoder")]
    other = pool("encoder", served.folder, flags={**served.flags, "name": "other"})
    served.write([*both, other])
    was = served.controller
    kill(was)
    await until(lambda: any("other" in line["pool"] for line in served.said("worker ready")), seconds=60)
    worker = next(line["worker"] for line in served.said("worker ready") if "other" in line["pool"])
    served.write(both)
    async with Asking(served.target) as asking:
        kill(served.controller)
        await until(lambda: any(line["worker"] == worker for line in served.said("removed")), seconds=60)
        await asking.more()
    assert next(line for line in served.said("removed") if line["worker"] == worker)["drained"]


@pytest.mark.chaos
async def test_two_models_live_in_one_fleet_and_each_is_answered_by_its_own(served: Served, tmp_path: Path) -> None:
    """A tiny model of random weights beside the digits: its greedy answer is that of its one process alone."""
    await settled(served)
    model = tmp_path / "tiny"
    shutil.copytree(SHIPPED / "digits", model)
    checkpoints_tiny.write(model, json.loads((model / "config.json").read_text(encoding="utf-8")), seed=1)
    own = {**served.flags, "model": str(model), "name": "tiny"}
    both = [pool(role, served.folder, flags=served.flags) for role in ("encoder", "decoder")]
    served.write([*both, *(pool(role, served.folder, flags=own) for role in ("encoder", "decoder"))])
    kill(served.controller)
    frames, _ = drawn(np.random.default_rng(5), 3)
    asked: Content = [Video(digits.clip(frames)), "Read the digits."]
    async with AsyncClient(served.target, max_retries=4) as client:
        end = time.monotonic() + 100
        while not any(known.name == "tiny" and known.ready for known in await client.list_models()):
            assert time.monotonic() < end, "nobody serves it"
            await asyncio.sleep(0.1)
        async with Asking(served.target) as asking:
            told = [await client.generate("tiny", asked, max_tokens=6) for _ in range(3)]
            await asking.more()
    async with AsyncClient.in_process(str(model)) as alone:
        expected = await alone.generate(str(model), asked, max_tokens=6)
    assert [answer.text for answer in told] == [expected.text] * 3
    served.write(both)
    kill(served.controller)
    await settled(served)
