"""Products with weights against sums in double precision, for every way in which they are called."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from chiasm.layers.linear import FEW_ROWS, Linear, linear

CPU = torch.device("cpu")


def draw(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def filled(dtype: torch.dtype) -> tuple[Linear, Tensor]:
    """A product with a weight that is copied in, as loading does it, and that weight."""
    linear = Linear(40, 24, device=CPU, dtype=dtype)
    weight = draw(24, 40, seed=1, dtype=dtype)
    linear.load_state_dict({"weight": weight})
    return linear, weight


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 2, FEW_ROWS, FEW_ROWS + 1])
def test_a_product_is_rows_times_outputs(rows: int, dtype: torch.dtype) -> None:
    linear, weight = filled(dtype)
    x = draw(rows, 40, seed=2, dtype=dtype)
    got = linear(x)
    assert got.shape == (rows, 24) and got.dtype == dtype and got.is_contiguous()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(got.double(), x.double() @ weight.double().T, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rows", [2, FEW_ROWS])
def test_columns_are_the_same_bits_as_rows(rows: int) -> None:
    linear, weight = filled(torch.bfloat16)
    x = draw(rows, 40, seed=2, dtype=torch.bfloat16)
    assert linear.from_left(rows)
    assert torch.equal(linear.columns(x.t().contiguous(), weight).t(), linear(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5])
def test_a_product_can_be_learnt_through(rows: int, dtype: torch.dtype) -> None:
    linear, weight = filled(dtype)
    x = draw(rows, 40, seed=2, dtype=dtype).requires_grad_()
    linear(x).sum().backward()
    assert x.grad is not None and linear.weight.grad is not None
    torch.testing.assert_close(x.grad, weight.sum(0, dtype=torch.float32).to(dtype).expand(rows, -1))
    torch.testing.assert_close(linear.weight.grad, x.detach().float().sum(0).to(dtype).expand(24, -1))


def test_rows_of_the_weight_can_be_filled_one_after_another() -> None:
    linear, weight = filled(torch.float32)
    with torch.no_grad():
        linear.weight[5:9].copy_(torch.zeros(4, 40))
    x = draw(3, 40, seed=2, dtype=torch.float32)
    expected = x @ weight.T
    expected[:, 5:9] = 0
    torch.testing.assert_close(linear(x), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(4096, 64, 192), (7, 256, 64), (100, 1152, 64)])
def test_a_product_of_many_rows_is_right_with_and_without_gradients(
    dtype: torch.dtype, rows: int, inputs: int, outputs: int
) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(inputs, outputs, dtype=dtype), draw(rows, inputs, seed=2, dtype=dtype)
    learnt = linear(layer, x)
    assert learnt.requires_grad
    with torch.inference_mode():
        wide = nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
        bound = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8}[dtype] * float(wide.abs().max())
        for product in (learnt, linear(layer, x)):
            assert product.dtype == dtype and float((product.double() - wide).abs().max()) <= bound
