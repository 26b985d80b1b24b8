"""Products with a weight and no bias, laid out and called as a CPU does them soonest for few rows.

A decode step multiplies a handful of rows with every weight there is, so it takes as long as the weights take to be
read, and some ways to read them are slower. Measured on one core (AVX-512, torch 2.13, medians of A B B A): in float32
weights whose rows are inputs take 0.8 to 1.0 times as long as weights whose rows are outputs, from 1 row to 256. In
bfloat16 a product with a vector takes 0.6 to 0.8 times as long as the same product as one of matrices, and with the
weight on the left it takes 0.75 to 1.0 times as long for up to 64 rows, what turning the result costs included. What is
computed is the same, up to the order of sums.

It knows no model.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FEW_ROWS = 64
"""Rows up to which bfloat16 is multiplied with the weight on the left."""


class Linear(nn.Linear):
    """x @ weight.T for an (outputs, inputs) weight."""

    def __init__(self, inputs: int, outputs: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(inputs, outputs, bias=False, device=device, dtype=dtype)
        self._few_rows = few_rows(device, dtype)
        self._turned = device.type == "cpu" and not self._few_rows
        self.weight = nn.Parameter(self.laid(self.weight.detach()))

    def __call__(self, x: Tensor) -> Tensor:
        """`forward`, at once: hooks are not looked for. A decode step consists of such calls."""
        return self.forward(x)

    def laid(self, weight: Tensor) -> Tensor:
        """An (outputs, inputs) weight as this layer keeps it."""
        return weight.t().contiguous().t() if self._turned else weight

    def forward(self, x: Tensor) -> Tensor:
        """(rows, inputs) to (rows, outputs)."""
        return self.product(x, self.weight)

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """As `forward`, with another weight that is `laid`."""
        if not self.from_left(x.shape[0]):
            return torch.mv(weight, x[0]).unsqueeze(0) if self._few_rows and x.shape[0] == 1 else F.linear(x, weight)
        return torch.mm(weight, x.t()).t().contiguous()

    def from_left(self, rows: int) -> bool:
        """Whether so many rows are multiplied with the weight on the left: who has more than one product to make of
        them can then leave what lies between on its side, in `columns`, and need not turn it twice."""
        return 1 < rows <= self._few_rows

    def columns(self, x_cn: Tensor, weight: Tensor) -> Tensor:
        """(inputs, rows) to (outputs, rows), with a weight that is `laid`."""
        return torch.mm(weight, x_cn)


class Tied(Linear):
    """`Linear` with a weight that another layer holds, in that layer's memory and as it lies there: a head that is the
    table of embeddings."""

    def __init__(self, weight: Tensor, *, device: torch.device) -> None:
        outputs, inputs = weight.shape
        super().__init__(inputs, outputs, device=torch.device("meta"), dtype=weight.dtype)
        self._few_rows = few_rows(device, weight.dtype)
        self.weight = weight

    def laid(self, weight: Tensor) -> Tensor:
        return weight


def few_rows(device: torch.device, dtype: torch.dtype) -> int:
    """Rows up to which a product is sooner made with the weight on the left."""
    return FEW_ROWS if device.type == "cpu" and dtype == torch.bfloat16 else 0


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """layer(x) of (rows, inputs), in many rows.

    On a CPU in bfloat16 the operator to which torch's compiler turns it takes 0.4 to 0.9 times as long, and makes the
    same bits: `addmm` lays the bias out first, which is most of a product of 64 columns.
    """
    if _fuses(x):
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, layer.weight, layer.bias, "none", [], "")
        return product
    out: Tensor = layer(x)
    return out


def linear_gelu(layer: nn.Linear, x: Tensor, *, approximate: Literal["none", "tanh"]) -> Tensor:
    """gelu(layer(x)) of (rows, inputs).

    On a CPU in bfloat16 the product applies it to its float32 sums before they are rounded, where oneDNN has that: by
    itself torch's tanh GELU takes as long there as a product of 1,152 columns, and five times as long as one of 64. The
    operator is the one to which torch's compiler turns this expression; it knows no gradient.
    """
    if _fuses(x):
        fused: Tensor = torch.ops.mkldnn._linear_pointwise(x, layer.weight, layer.bias, "gelu", [], approximate)
        return fused
    return F.gelu(layer(x), approximate=approximate)


def _fuses(x: Tensor) -> bool:
    return x.is_cpu and x.dtype == torch.bfloat16 and _has_fused() and not torch.is_grad_enabled()


@cache
def _has_fused() -> bool:
    """Whether this build has the operator, and the processor what it needs."""
    if not torch.backends.mkldnn.is_available():
        return False
    operators = torch.ops.mkldnn
    return hasattr(operators, "_linear_pointwise") and bool(operators._is_mkldnn_bf16_supported())
