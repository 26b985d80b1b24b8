"""`client.condition`: what is sent, what comes of it, and what torch has to do with it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from chiasm.client import AsyncClient, Client, Conditioning, Image
from chiasm.client.reading import StatesReader
from chiasm.errors import InvalidRequest, ServerError, Unsupported
from chiasm.rpc.tensor import parts_of
from chiasm.rpc.v1 import common_pb2 as pb
from chiasm.rpc.v1 import router_pb2 as rpb
from tests.client.fake import FakeTransport

PICTURE = np.zeros((64, 64, 3), dtype=np.uint8)


def test_states_of_one_layer_are_one_matrix_and_of_several_are_stacked_in_order() -> None:
    with Client.in_process("digits") as client:
        several = client.condition("digits", ["Read the digits.", Image(PICTURE)], layers=[3, 1])
        one = client.condition("digits", ["Read the digits.", Image(PICTURE)], layer=1)
        tokens = client.condition("digits", token_ids=[5, 9, 2], layer=1)
    assert (type(several), several.layers, one.layers) == (Conditioning, (3, 1), (1,))
    assert several.states.shape == (2, several.usage.prompt_tokens, one.states.shape[1])
    assert (one.states == several.states[1]).all() and one.dtype == "float32" and one.usage.output_tokens == 0
    assert tokens.states.shape[0] == tokens.usage.prompt_tokens == 3, "no template"


def test_16_bits_are_bits_of_an_array_and_numbers_of_a_tensor() -> None:
    with Client.in_process("digits") as client:
        whole = torch.from_numpy(client.condition("digits", "Read.", layer=2).states.copy())
        bits = client.condition("digits", "Read.", layer=2, dtype="bfloat16")
        tensor = client.condition("digits", "Read.", layer=2, dtype="bfloat16", into="torch")
        half = client.condition("digits", "Read.", layer=2, dtype="float16")
        wide = client.condition("digits", "Read.", layer=2, into="torch")
    assert bits.states.dtype == np.uint16 and bits.dtype == "bfloat16" and half.states.dtype == np.float16
    assert torch.equal(tensor.states, whole.to(torch.bfloat16))
    assert torch.equal(torch.from_numpy(bits.states.view(np.int16)).view(torch.bfloat16), tensor.states)
    assert torch.equal(wide.states, whole)


def test_the_client_loads_no_torch_before_its_tensors_are_asked_for() -> None:
    said = (
        "import asyncio, sys\n"
        "from chiasm.client import AsyncClient\n"
        "from tests.client.fake import FakeTransport\n"
        "async def main():\n"
        "    async def opened(): return FakeTransport()\n"
        "    async with AsyncClient(transport=opened) as client:\n"
        "        got = await client.condition('m', 'x', layers=[1, 2])\n"
        "        assert got.states.shape == (2, 2, 3) and 'torch' not in sys.modules\n"
        "        got = await client.condition('m', 'x', layer=1, into='torch')\n"
        "        assert type(got.states).__module__ == 'torch' and 'torch' in sys.modules\n"
        "asyncio.run(main())\n"
    )
    subprocess.run([sys.executable, "-c", said], check=True, timeout=60)


async def test_without_torch_its_tensors_are_refused_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = FakeTransport()

    async def opened() -> FakeTransport:
        return transport

    monkeypatch.setitem(sys.modules, "torch", None)
    async with AsyncClient(transport=opened) as client:
        with pytest.raises(Unsupported, match="torch"):
            await client.condition("m", "x", layer=1, into="torch")
    assert not transport.timeouts


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, TypeError),
        ({"layer": 1, "layers": [2]}, TypeError),
        ({"layers": []}, InvalidRequest),
        ({"layers": [1, 1]}, InvalidRequest),
        ({"layer": 0}, InvalidRequest),
        ({"layer": 1, "dtype": "int8"}, InvalidRequest),
        ({"layer": 1, "into": "jax"}, InvalidRequest),
        ({"layer": 1, "media": [Image(PICTURE)]}, TypeError),
        ({"layer": 1, "token_ids": [1]}, TypeError),
    ],
)
async def test_what_cannot_be_is_refused_here(options: dict[str, Any], error: type[Exception]) -> None:
    async with AsyncClient.in_process("digits") as client:
        with pytest.raises(error):
            await client.condition("digits", "x", **options)


def piece(layer: int = 1, *, shape: tuple[int, int] = (2, 3), tensor: int = 0, data: bytes = bytes(24)) -> Any:
    described = pb.TensorDescriptor(name="states", layer=layer, dtype=pb.DTYPE_FLOAT32, shape=shape)
    (part,) = parts_of(described, data, tensor=tensor)
    return rpb.ConditionResponse(states=part)


END = rpb.ConditionResponse(finished=pb.Finished(usage=pb.Usage()))


@pytest.mark.parametrize(
    "responses",
    [[END], [piece(1), END], [piece(1), piece(2, tensor=1)], [piece(2), piece(1, tensor=1), END]],
    ids=["nothing", "one of two", "no end", "another order"],
)
def test_states_that_are_not_whole_or_not_those_are_an_error_of_the_server(responses: list[Any]) -> None:
    reader = StatesReader([1, 2], "float32", alone=False)
    for response in responses:
        reader.read(response)
    with pytest.raises(ServerError):
        reader.whole("label", "numpy")
