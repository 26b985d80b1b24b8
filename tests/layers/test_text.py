"""Text layers against the stock Qwen3 of transformers, weights copied over, float32 and bfloat16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from chiasm.attention.dense import DenseAttention
from chiasm.layers.mlp import GatedMLP, keep_steady, steady_silu
from chiasm.layers.norm import RMSNorm
from chiasm.layers.rope import MultimodalRope, inverse_frequencies, rotate, tables
from chiasm.layers.self_attention import SelfAttention

CPU = torch.device("cpu")
SECTION = (4, 2, 2)
THETA = 1e4

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def settings(**changes: Any) -> dict[str, Any]:
    return {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA, **changes},
        "max_position_embeddings": 4096,
    }


def stock() -> Qwen3Config:
    config = Qwen3Config(**settings())
    config._attn_implementation = "sdpa"
    return config


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def signed(sin_nd: Tensor) -> Tensor:
    """A stock table of sines as ours has it: with a sign, and of one head."""
    left, right = sin_nd.chunk(2, dim=-1)
    return torch.cat((-left, right), dim=-1).unsqueeze(1)


def stacked(split: dict[str, Tensor], name: str, *parts: str) -> dict[str, Tensor]:
    """A stock module's weights with some of its projections as one, as ours has them."""
    rest = {key: tensor for key, tensor in split.items() if key.removesuffix(".weight") not in parts}
    return rest | {f"{name}.weight": torch.cat([split[f"{part}.weight"] for part in parts])}


def randomised(module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Fills a stock module with weights that are neutral nowhere, and returns them."""
    module.to(dtype)
    with torch.no_grad():
        for i, (name, parameter) in enumerate(module.named_parameters()):
            noise = draw(*parameter.shape, seed=i)
            parameter.copy_(1 + 0.2 * noise if "norm" in name or parameter.dim() == 1 else 0.15 * noise)
    return module.state_dict()


@dtypes
def test_rms_norm(dtype: torch.dtype) -> None:
    theirs = Qwen3RMSNorm(48, eps=1e-6)
    ours = RMSNorm(48, 1e-6, device=CPU, dtype=dtype)
    ours.load_state_dict(randomised(theirs, dtype))
    for rows in (1, 7):
        for scale in (1e-4, 1.0, 300.0):
            x = draw(rows, 48, dtype=dtype) * scale
            if dtype == torch.bfloat16:
                assert torch.equal(ours(x), theirs(x)), "the order of roundings decides the last bit"
            else:
                torch.testing.assert_close(ours(x), theirs(x), rtol=1e-6, atol=0)


@dtypes
def test_gated_mlp(dtype: torch.dtype) -> None:
    theirs: nn.Module = Qwen3MLP(stock())  # type: ignore[no-untyped-call]
    ours = GatedMLP(48, 80, device=CPU, dtype=dtype)
    ours.load_state_dict(stacked(randomised(theirs, dtype), "gate_up_proj", "gate_proj", "up_proj"))
    for rows in (1, 7, 100):
        x = draw(rows, 48, dtype=dtype)
        tolerance = 1e-6 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(ours(x), theirs(x), rtol=tolerance, atol=tolerance)


@dtypes
def test_self_attention(dtype: torch.dtype) -> None:
    theirs = Qwen3Attention(stock(), layer_idx=0)
    ours = SelfAttention(48, 6, 2, 16, layer=0, eps=1e-6, device=CPU, dtype=dtype)
    ours.load_state_dict(stacked(randomised(theirs, dtype), "qkv_proj", "q_proj", "k_proj", "v_proj"))
    x = draw(2, 9, 48, dtype=dtype)
    positions = torch.arange(9).expand(2, -1) + torch.tensor([[0], [30]])
    cos, sin = Qwen3RotaryEmbedding(stock())(x, positions)
    expected, _ = theirs(x, (cos, sin), attention_mask=None)
    rope = MultimodalRope(16, THETA, SECTION, device=CPU)
    ours_cos, ours_sin = rope.tables(positions.reshape(1, -1).expand(3, -1), dtype)
    assert torch.equal(ours_cos, cos.flatten(0, 1).unsqueeze(1)) and torch.equal(ours_sin, signed(sin.flatten(0, 1)))
    attention = DenseAttention(2, [], torch.zeros(2, 9, 2, dtype=torch.long))
    got = ours(x.flatten(0, 1), ours_cos, ours_sin, attention)
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got, expected.flatten(0, 1), rtol=tolerance, atol=tolerance)


@dtypes
@pytest.mark.parametrize(("dim", "section"), [(16, (4, 2, 2)), (32, (6, 5, 5)), (128, (24, 20, 20)), (16, (4, 4, 0))])
def test_interleaved_rotary_tables(dtype: torch.dtype, dim: int, section: tuple[int, int, int]) -> None:
    config = Qwen3VLTextConfig(**settings(mrope_section=list(section), mrope_interleaved=True) | {"head_dim": dim})
    positions = torch.randint(0, 3000, (3, 1, 40), generator=torch.Generator().manual_seed(1))
    cos, sin = Qwen3VLTextRotaryEmbedding(config)(torch.zeros(1, dtype=dtype), positions)
    got = MultimodalRope(dim, THETA, section, device=CPU).tables(positions[:, 0], dtype)
    assert torch.equal(got[0], cos[0].unsqueeze(1)) and torch.equal(got[1], signed(sin[0]))
    assert got[0].dtype == dtype


def test_every_frequency_belongs_to_one_axis() -> None:
    axis = MultimodalRope(128, 5e6, (24, 20, 20), device=CPU).axis
    assert axis.bincount().tolist() == [24, 20, 20]
    assert axis[:6].tolist() == [0, 1, 2, 0, 1, 2]
    assert axis[57:].tolist() == [0, 1, 2, 0, 0, 0, 0]


def test_moved_keys_are_keys_turned_once_more() -> None:
    """A frame's keys at t + D are its keys at t under the plain rotation by D, wherever they are inside the frame."""
    rope = MultimodalRope(16, 5e6, SECTION, device=CPU)
    rope.inverse = inverse_frequencies(16, 5e6, device=CPU).double()
    keys = draw(12, 2, 16).double()
    inside = torch.stack([torch.zeros(12), torch.arange(12) // 4, torch.arange(12) % 4]).long()

    def at(positions: Tensor) -> tuple[Tensor, Tensor]:
        return tables(positions.double()[rope.axis].T * rope.inverse, torch.float64)

    for start, by in ((0, 7), (50, 1000), (900, -900)):
        there = rotate(keys, *at(inside + start + by))
        moved = rotate(rotate(keys, *at(inside + start)), *at(torch.full((3, 12), by)))
        torch.testing.assert_close(moved, there, rtol=0, atol=1e-12)


def test_rotation_keeps_lengths_and_products_depend_on_distances() -> None:
    rope = MultimodalRope(16, THETA, SECTION, device=CPU)
    q, k = draw(1, 2, 16, seed=1), draw(1, 2, 16, seed=2)

    def turned(x: Tensor, at: int) -> Tensor:
        return rotate(x, *rope.tables(torch.full((3, 1), at), torch.float32))

    torch.testing.assert_close(turned(q, 777).norm(dim=-1), q.norm(dim=-1))
    near, far = ((turned(q, at + 5) * turned(k, at)).sum(-1) for at in (3, 1003))
    torch.testing.assert_close(near, far, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_steady_silu_gives_equal_numbers_equal_results_wherever_they_lie(dtype: torch.dtype) -> None:
    x = (4 * torch.randn(20_011, generator=torch.Generator().manual_seed(0))).to(dtype)
    whole = steady_silu(x)
    pieces = torch.cat([steady_silu(piece) for piece in x.split(23)])
    assert torch.equal(pieces, whole)
    torch.testing.assert_close(whole, F.silu(x))


def test_an_mlp_can_be_made_steady() -> None:
    torch.manual_seed(0)
    mlp = nn.ModuleList([GatedMLP(8, 24, device=CPU, dtype=torch.float32)])
    x = torch.randn(3, 8)
    usual = mlp[0](x)
    keep_steady(mlp)
    part = mlp[0]
    assert isinstance(part, GatedMLP) and part.activation is steady_silu
    torch.testing.assert_close(part(x), usual)
