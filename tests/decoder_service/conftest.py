"""Models that are asked, of every kind of entry there is."""

from __future__ import annotations

import pytest

from tests.decoder_service.oracle import Oracle
from tests.fuzz.timelines import oracle


@pytest.fixture(params=["random", "qwen3_vl"])
def judge(request: pytest.FixtureRequest) -> Oracle:
    """A random model whose layers attend to units apart from the text, and one whose units lie over placeholders."""
    return oracle(request.param)
