"""Systems of processes that the tests beside hurt, and a quiet one that says what is right."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from chiasm import AsyncClient
from tests.processes import Trio, trio


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    """Two encoders, a decoder and a router. A test that hurts one leaves it as it was."""
    with trio(
        tmp_path_factory.mktemp("pair"),
        encoders=2,
        encoder=["--lease-seconds", "5"],
        decoder=["--deterministic"],
        router=["--patience", "8"],
    ) as made:
        yield made


@pytest.fixture
async def quiet() -> AsyncIterator[AsyncClient]:
    """A system in one process that nobody hurts."""
    async with AsyncClient.in_process("digits") as made:
        yield made
