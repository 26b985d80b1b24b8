"""Encoders on one node, the decoder on another, and a store between them that both share."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from chiasm import AsyncClient, Video
from chiasm.client import Content
from tests import digits
from tests.e2e.test_digits import drawn
from tests.processes import trio
from tests.redis_server import redis_server
from tests.waiting import until

QUESTION = "Read the digits."


async def test_entries_cross_nodes_through_the_shared_store_and_known_media_do_too(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    with redis_server() as server:
        shared = ["--redis", server.url, "--redis-timeout", "5"]
        with trio(tmp_path, nodes=2, encoders=2, encoder=shared, decoder=shared, router=["--fan-out", "2"]) as served:
            async with AsyncClient(served.target) as client:
                for _ in range(4):
                    frames, shown = drawn(rng, 6)
                    asked: Content = [Video(digits.clip(frames)), QUESTION]
                    answer = await client.generate("digits", asked, max_tokens=24)
                    assert answer.text == " ".join(map(str, shown))
                    again: Content = ["Look: ", Video(digits.clip(frames)), QUESTION]
                    known = await client.generate("digits", again, max_tokens=1)
                    assert known.usage.media[0].units_cached == 6
            counted = [encoder.counted() for encoder in served.encoders]
            assert sum(count["chiasm_encoder_units_total:encoded"] for count in counted) == 24
            assert sum(count["chiasm_cache_tier_puts_total:redis"] for count in counted) >= 24
            read = served.decoder.counted()
            assert read["chiasm_cache_tier_hits_total:redis"] >= 24, "no other way leads from node to node"
            await served.settled()


async def test_an_outage_of_the_store_between_nodes_is_waited_out_and_fails_no_request(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    with redis_server() as server:
        shared = ["--redis", server.url]
        with trio(tmp_path, nodes=2, encoder=shared, decoder=shared) as served:
            async with AsyncClient(served.target, max_retries=0) as client:

                async def read(count: int) -> None:
                    frames, shown = drawn(rng, count)
                    answer = await client.generate("digits", [Video(digits.clip(frames)), QUESTION], max_tokens=24)
                    assert answer.text == " ".join(map(str, shown))

                await read(3)
                server.kill()
                asking = [asyncio.create_task(read(count)) for count in (2, 5, 8)]
                opened = "chiasm_shared_cache_breaker_opened_total"
                await until(lambda: served.encoder.counted()[opened] > 0)
                assert not any(task.done() for task in asking), "nothing can have come to the decoder"
                server.start()
                await asyncio.gather(*asking)
            await served.settled()
