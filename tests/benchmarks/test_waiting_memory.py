"""`python -m benchmarks waiting_memory`: it runs and says what it promises. How much it says is for `docs`."""

from __future__ import annotations

import json

import pytest

from benchmarks import waiting_memory


def test_it_tells_what_a_waiting_request_takes_beyond_its_stream(capsys: pytest.CaptureFixture[str]) -> None:
    waiting_memory.main(["--requests", "5", "--units", "4", "--json"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(result) == [
        "kib_per_request",
        "known_kib_per_request",
        "announced_kib_per_request",
        "stream_kib",
        "text_kib",
        "pixel_values_kib",
        "ratio",
        "requests",
        "units",
    ]
    assert (result["requests"], result["units"]) == (5, 4)
    assert result["pixel_values_kib"] == 4 * 144 * 12, "12 KiB a visual token"
