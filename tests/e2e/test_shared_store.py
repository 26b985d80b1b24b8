"""Whole processes with a store that nodes share: right answers with it, without it, and when it comes back."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

from chiasm import AsyncClient, Image
from tests import digits
from tests.processes import Trio, trio
from tests.redis_server import redis_server

QUESTION = "Read the digits."


async def read_right(client: AsyncClient, number: int) -> None:
    path, digit = digits.shipped_images()[number]
    said = await client.generate("digits", [Image(path.read_bytes()), QUESTION], max_tokens=24)
    assert str(digit) in said.text, (digit, said.text)


ENTRIES = 3
"""Of a clip of one frame: its unit, what it was found to be, and what became of it."""

CHOICES = 1
"""Which form of entries decoders ask for is kept there too."""


async def test_answers_are_right_with_the_shared_store_and_without_it(tmp_path: Path) -> None:
    with redis_server() as server:
        shared = ("--redis", server.url, "--redis-policy", "through", "--redis-timeout", "5")
        with trio(tmp_path, encoder=shared, decoder=shared) as served:
            async with AsyncClient(served.target) as client:
                await read_right(client, 0)
                counted = served.encoder.counted()
                assert counted["chiasm_cache_tier_puts_total:redis"] == ENTRIES
                assert counted["chiasm_cache_tier_puts_total:arena"] == ENTRIES
                assert counted["chiasm_shared_cache_breaker:closed"] == 1
                assert len(server.names("chiasm:entry:*")) == ENTRIES + CHOICES

                server.kill()
                for number in (1, 2, 3, 4):
                    await read_right(client, number)
                counted = served.encoder.counted()
                assert counted["chiasm_shared_cache_failures_total:connection"] >= 3
                assert counted["chiasm_shared_cache_breaker_opened_total"] >= 1

                server.start()
                await closed(served)
                await read_right(client, 5)
                assert len(server.names("chiasm:entry:*")) == ENTRIES
                assert sum(value for name, value in served.decoder.counted().items() if "rejected" in name) == 0
            await served.settled()


async def test_a_second_node_finds_in_the_shared_store_what_the_first_has_made(tmp_path: Path) -> None:
    """One fleet's secrets, two regions: as an encoder is on another machine, or the first one's machine was lost."""
    with redis_server() as server:
        shared = ("--redis", server.url, "--redis-policy", "through", "--redis-timeout", "5")
        keys = [tmp_path / "workers.key", tmp_path / "tenants.key"]
        for key in keys:
            key.touch(0o600)
            key.write_text(secrets.token_hex(32), encoding="ascii")
        workers = (*shared, "--workers-secret-file", str(keys[0]))
        outcomes = []
        for name in ("one", "other"):
            folder = tmp_path / name
            folder.mkdir()
            router = ("--tenants-secret-file", str(keys[1]))
            with trio(folder, encoder=workers, decoder=workers, router=router) as served:
                async with AsyncClient(served.target) as client:
                    await read_right(client, 0)
                counted = served.encoder.counted()
                outcomes.append({name: counted[f"chiasm_encoder_units_total:{name}"] for name in ("encoded", "cached")})
        assert outcomes == [{"encoded": 1, "cached": 0}, {"encoded": 0, "cached": 1}]


async def closed(served: Trio) -> None:
    """Waits until the encoder asks the shared store again."""
    for _ in range(600):
        if (await asyncio.to_thread(served.encoder.counted))["chiasm_shared_cache_breaker:closed"]:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the breaker stayed open")
