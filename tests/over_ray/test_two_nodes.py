"""Client → router → actors on two Ray nodes → entries through the store that both share: right answers, and still right
ones when an actor, the controller or a whole node is gone."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from chiasm import AsyncClient, Video
from chiasm.client import Content, Token
from tests import digits
from tests.e2e.test_digits import drawn
from tests.over_ray.clusters import Asking, Cluster, Fleet, cluster, fleet, kill, parent, pool, read_right
from tests.redis_server import RedisServer, redis_server
from tests.waiting import gone, until

pytestmark = pytest.mark.timeout(240)  # the first of them starts two nodes and loads two models


class Served(Fleet):
    """With what it stands on."""

    nodes: Cluster
    store: RedisServer


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """An encoder on one node, a decoder on another."""
    folder = tmp_path_factory.mktemp("fleet")
    with redis_server() as store, cluster() as nodes:
        nodes.add(encoder=4)
        nodes.add(decoder=4)
        flags = {"redis": store.url, "redis-timeout": "5"}
        pools = [pool("encoder", folder, flags=flags), pool("decoder", folder, flags=flags)]
        with fleet(Served, nodes.address, folder, pools) as made:
            made.nodes, made.store = nodes, store
            yield made
        assert not (folder / "arenas").exists(), "the last worker of a node takes its region with it"


async def settled(served: Served) -> None:
    await until(lambda: all(len(served.serving(role)) == 1 for role in ("encoder", "decoder")), seconds=60)
    await read_right(served.target)


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


@pytest.mark.parametrize(("role", "which"), [("encoder", "actor"), ("decoder", "process")])
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


@pytest.mark.parametrize("which", ["actor", "process"])
async def test_a_worker_that_stands_still_is_killed_and_replaced(served: Served, which: str) -> None:
    await settled(served)
    before = served.worker("encoder")
    actor = parent(before["pid"])
    os.kill(actor if which == "actor" else before["pid"], signal.SIGSTOP)
    await read_right(served.target)
    await gone(before["pid"], actor)
    await settled(served)
    assert served.worker("encoder")["worker"] != before["worker"]


async def test_the_router_serves_without_its_controller_and_the_next_one_adopts_the_same_workers(
    served: Served,
) -> None:
    await settled(served)
    before, was = {role: served.worker(role)["pid"] for role in ("encoder", "decoder")}, served.controller
    adopted = len(served.said("adopted"))
    async with Asking(served.target) as asking:
        kill(was)
        await asking.more()
        await until(lambda: len(served.said("adopted")) == adopted + 2, seconds=60)
        await asking.more()
    await settled(served)
    assert served.controller != was
    assert {role: served.worker(role)["pid"] for role in before} == before


async def test_new_settings_come_to_one_worker_after_another_and_no_request_fails(
    served: Served, tmp_path: Path
) -> None:
    """The next controller reads the plan anew; what it finds running otherwise it replaces."""
    await settled(served)
    before = {role: served.worker(role)["worker"] for role in ("encoder", "decoder")}
    flags = {"redis": served.store.url, "redis-timeout": "5", "max-units": "16"}
    served.write([pool(role, served.folder, flags=flags) for role in ("encoder", "decoder")])
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
