"""Ray's control store dies, and comes back: requests go on, and so do the workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.over_ray.clusters import Asking, Fleet, cluster, fleet, kill, pool, read_right
from tests.waiting import alive, until


@pytest.mark.timeout(180)
async def test_requests_go_on_without_the_control_store_whoever_dies_meanwhile(tmp_path: Path) -> None:
    with cluster() as nodes:
        nodes.add(encoder=2, decoder=2)
        pools = [pool("encoder", tmp_path), pool("decoder", tmp_path)]
        with fleet(Fleet, nodes.address, tmp_path, pools) as served:
            before = {role: served.worker(role)["pid"] for role in ("encoder", "decoder")}
            async with Asking(served.target) as asking:
                await asking.more()
                nodes.kill_control_store()
                await asking.more(5)
                was = served.controller
                kill(was)
                await until(lambda: served.controller != was)
                await asking.more(5)
            assert all(alive(pid) for pid in before.values())
            assert served.router.event("died") is None
            await read_right(served.target)
