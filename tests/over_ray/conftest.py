"""One cluster for all of these tests, and one fleet on it: to start both costs more than any of the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.over_ray.clusters import Served, cluster, fleet, pool
from tests.redis_server import redis_server


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """An encoder on one node, a decoder on another."""
    folder = tmp_path_factory.mktemp("fleet")
    with redis_server() as store, cluster() as nodes:
        nodes.add(encoder=4)
        nodes.add(decoder=4)
        flags = {"redis": store.url, "redis-timeout": "5"}
        pools = [pool("encoder", folder, flags=flags), pool("decoder", folder, flags=flags)]
        with fleet(Served, nodes.address, folder, pools) as made:
            made.nodes, made.store, made.flags = nodes, store, flags
            yield made
        assert not (folder / "arenas").exists(), "the last worker of a node takes its region with it"
