"""What importing a part of the library may cost, measured in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "flashinfer", "ray", "sklearn")
MEDIA = ("av",)


def loaded(module: str) -> set[str]:
    """Top-level packages present after `import module` in a fresh interpreter."""
    code = f"import {module}, sys, json; print(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


@pytest.mark.parametrize(
    "module", ["chiasm", "chiasm.errors", "chiasm.rpc.status", "chiasm.rpc.channel", "chiasm.client"]
)
def test_the_light_parts_load_no_model_library_and_no_decoder(module: str) -> None:
    assert loaded(module).isdisjoint({*HEAVY, *MEDIA})


@pytest.mark.parametrize("module", ["chiasm.rpc.server", "chiasm.cli", "router"])
def test_the_router_and_the_command_line_load_no_model_library(module: str) -> None:
    assert loaded(module).isdisjoint(HEAVY)


def test_the_wire_loads_no_more_than_grpc() -> None:
    assert "chiasm" in loaded("chiasm.rpc.server")
    assert "pydantic" not in loaded("chiasm.rpc.server")
