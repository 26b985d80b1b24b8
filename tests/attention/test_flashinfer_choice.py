"""Which attention serves, by device, type, heads and what is installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from chiasm.attention.choose import choose, make
from chiasm.attention.torch_backend import TorchAttention
from chiasm.settings import SettingsError
from tests.attention import judge

FIT: dict[str, Any] = {
    "heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "device": torch.device("cuda"),
    "dtype": torch.bfloat16,
    "installed": True,
}


def test_auto_is_flashinfer_where_it_can_serve() -> None:
    assert choose("auto", **FIT) == "flashinfer"
    assert choose("flashinfer", **FIT) == "flashinfer"
    assert choose("torch", **FIT) == "torch"


@pytest.mark.parametrize(
    ("changed", "said", "fix"),
    [
        ({"device": torch.device("cpu")}, "the device is cpu", "--attention auto"),
        ({"dtype": torch.float32}, "computes in torch.float32", "--attention auto"),
        ({"head_dim": 32}, "heads have 32 dimensions, its kernels 64, 128, 256", "--attention auto"),
        ({"heads": 6, "kv_heads": 4}, "6 query heads are no multiple of 4 key heads", "--attention auto"),
        ({"deterministic": True}, "independent", "--attention auto"),
        ({"installed": False}, "not installed", "pip install 'chiasm[gpu]'"),
    ],
)
def test_where_it_cannot_auto_is_torch_and_asking_for_it_is_refused_with_the_reason(
    changed: dict[str, Any], said: str, fix: str
) -> None:
    assert choose("auto", **{**FIT, **changed}) == "torch"
    with pytest.raises(SettingsError, match=said) as refused:
        choose("flashinfer", **{**FIT, **changed})
    assert refused.value.where == "--attention"
    assert fix in refused.value.fix


def test_over_pools_on_a_cpu_torch_serves_and_flashinfer_is_refused() -> None:
    assert isinstance(make("auto", judge.pools(), heads=4), TorchAttention)
    with pytest.raises(SettingsError, match="the device is cpu"):
        make("flashinfer", judge.pools(), heads=4)
