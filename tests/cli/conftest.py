"""One served model for all tests that ask a question."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cli.serving import Served, serving


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    with serving("digits", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0") as running:
        yield running
