"""docker-compose.yml's own command lines, as processes: they make a fleet, and it reads digits."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest
import redis

from chiasm import AsyncClient, Video
from tests import digits
from tests.deploy.composed import Composed, composed


@pytest.mark.timeout(300)
async def test_the_services_of_compose_make_a_fleet_that_reads_digits() -> None:
    """Redis with its users, a head that remembers, two nodes, a router whose controller places a worker on each."""
    with (
        tempfile.TemporaryDirectory(prefix="dep-", ignore_cleanup_errors=True) as folder,  # Ray's sockets: a short path
        composed("cpu", Path(folder)) as fleet,
    ):
        await asyncio.to_thread(_start, fleet)
        router = await asyncio.to_thread(fleet.event, "router-cpu", "ready", seconds=150)
        clip = digits.shipped_clips()[0]
        async with AsyncClient(router["target"]) as client:
            answer = await client.generate("digits", [Video(clip.path), "Read the digits."], max_tokens=24)
        assert answer.text == clip.answer, fleet.told()
        here = {"http://127.0.0.1:9090": f"http://{router['http']}"}
        assert await asyncio.to_thread(fleet.well, "router-cpu", instead=here)
        assert _entries(fleet) >= 1, "they went from one node to the other through Redis"


def _start(fleet: Composed) -> None:
    for name in ("redis", "ray-store"):
        fleet.start(name)
    fleet.start("ray-head", f"--port={fleet.ports['ray-head']}")
    fleet.wait("ray-head")
    for name in ("encoder-cpu", "decoder-cpu"):
        fleet.start(name)
        fleet.says(name, "Ray runtime started")  # nodes of one machine take each other's ports if they start at once
    fleet.start("router-cpu")


def _entries(fleet: Composed) -> int:
    """As the user of `chiasm cache`, who may count; whoever has no name may say PING and no more."""
    port = fleet.ports["redis"]
    with redis.Redis(port=port, protocol=2) as nobody:
        assert nobody.ping()
        with pytest.raises(redis.exceptions.NoPermissionError):
            nobody.get("chiasm:entry:0")
    password = (fleet.secrets / "redis-cache.key").read_text("ascii").strip()
    with redis.Redis(port=port, protocol=2, username="chiasm-cache", password=password) as cache:
        return len(list(cache.scan_iter("chiasm:entry:*")))
