"""The page about the SDK: its blocks run against a served model and print what they say; no error is left out."""

from __future__ import annotations

import asyncio
import inspect
import re
import shutil
import sys
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import chiasm
from chiasm import errors
from chiasm.local import LocalService
from chiasm.models.registry import SHIPPED
from chiasm.rpc.limits import CLIENT_MESSAGE_BYTES
from chiasm.rpc.server import Server
from chiasm.rpc.v1 import router_pb2_grpc

PAGE = Path(chiasm.__file__).parent.parent / "docs" / "sdk.md"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SAID = re.compile(r"^\s*print\(.*\)  # (.+)$")
TARGET = "localhost:50051"


@pytest.fixture
async def target() -> AsyncIterator[str]:
    """The shipped model behind a socket."""
    service = await LocalService.start("digits")
    server = Server("127.0.0.1:0", message_bytes=CLIENT_MESSAGE_BYTES)
    server.add("chiasm.rpc.v1.Router", router_pb2_grpc.add_RouterServicer_to_server, service.router)
    await server.start()
    await server.set_ready(True)
    try:
        yield server.target
    finally:
        await server.stop(0)
        await service.close()


def run(blocks: list[str], target: str) -> int:
    """Runs the blocks one after the other as one program; counts the lines that were compared with what they print."""
    compared = 0
    space: dict[str, Any] = {"__name__": "page"}
    for block in blocks:
        lines = block.splitlines()

        def say(*values: object, of: list[str] = lines) -> None:
            nonlocal compared
            line = of[sys._getframe(1).f_lineno - 1]
            found = SAID.match(line)
            assert found is not None, f"nothing says what this prints: {line}"
            assert " ".join(map(str, values)) == found[1], line
            compared += 1

        space["print"] = say
        exec(compile(block.replace(TARGET, target), "sdk.md", "exec"), space)
    space["client"].close()
    return compared


async def test_every_block_of_the_page_runs_and_prints_what_it_says(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_out = SHIPPED / "digits" / "held_out"
    shutil.copy(held_out / "clip_3.mp4", tmp_path / "clip.mp4")
    shutil.copy(held_out / "image_7.png", tmp_path / "digit.png")
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall(PAGE.read_text())
    with ThreadPoolExecutor(1) as beside:
        compared = await asyncio.get_running_loop().run_in_executor(beside, run, blocks, target)
    assert compared >= 12


def test_the_table_of_errors_is_that_of_the_code() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.ChiasmError)]
    rows = dict(re.findall(r"^\| `(\w+)` \| ([A-Z_]*)", PAGE.read_text(), re.MULTILINE))
    for kind in kinds:
        code = kind.default_code if issubclass(kind, errors.StatusError) else kind.code
        assert rows.pop(kind.__name__) == ("" if code == "UNKNOWN" else code)


def test_the_page_names_every_argument_of_a_client() -> None:
    page = PAGE.read_text()
    for name in inspect.signature(chiasm.Client).parameters:
        assert f"`{name}`" in page or name == "transport", name
