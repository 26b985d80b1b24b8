from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.processes import Trio, trio


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    """Three processes that serve `digits`. A test that kills one starts it again."""
    with trio(tmp_path_factory.mktemp("trio")) as made:
        yield made
