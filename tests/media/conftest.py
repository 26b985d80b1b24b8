"""One sandbox for all media tests: starting a worker costs more than most of the tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from chiasm.media.sandbox import Sandbox


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def sandbox() -> AsyncIterator[Sandbox]:
    async with Sandbox(workers=2) as shared:
        yield shared
