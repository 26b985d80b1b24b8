"""A decoder half's arithmetic compiled by torch: norms, rotations and gates become few kernels.

Attention stays what it is. To the compiler it is an operator of unknown content, so that a forward is one graph
whatever the plan; the operator asks the attention that the step was given. A compiled forward can be captured in a CUDA
graph like any other.

Shapes are free, but torch compiles sizes of one apart, and a step in which nobody sees anything is another graph: the
first step of each kind waits for its compilation, from seconds to minutes. There are about six kinds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from chiasm.attention.backend import Attention
from chiasm.attention.torch_backend import TorchVarlen
from chiasm.models.family import DecoderHalf, Overlay

_numbers = itertools.count()  # operators have names, which are the process's


class Compiled:
    """`forward.Compute` of one half.

    Args:
        backend: of torch.compile.
    """

    def __init__(self, half: DecoderHalf, *, backend: str | Callable[..., Any] = "inductor") -> None:
        opaque = self._opaque = _Opaque()

        # Functions of their own, because the compiler counts the kinds of each.
        def seeing(ids_n: Tensor, positions_3n: Tensor, sees_n: Tensor, logits_at: Tensor) -> Tensor:
            return half.forward(ids_n, positions_3n, sees_n, logits_at, opaque)

        def blind(ids_n: Tensor, positions_3n: Tensor, logits_at: Tensor) -> Tensor:
            return half.forward(ids_n, positions_3n, None, logits_at, opaque)

        def overlaid(
            ids_n: Tensor, positions_3n: Tensor, rows_v: Tensor, features_vw: Tensor, logits_at: Tensor
        ) -> Tensor:
            return half.forward(ids_n, positions_3n, None, logits_at, opaque, Overlay(rows_v, features_vw))

        self._overlaid = torch.compile(overlaid, backend=backend, dynamic=True, fullgraph=True)
        self._seeing = torch.compile(seeing, backend=backend, dynamic=True, fullgraph=True)
        self._blind = torch.compile(blind, backend=backend, dynamic=True, fullgraph=True)

    def __call__(
        self,
        ids_n: Tensor,
        positions_3n: Tensor,
        sees_n: Tensor | None,
        logits_at: Tensor,
        attention: Attention,
        overlay: Overlay | None = None,
    ) -> Tensor:
        self._opaque.attention = attention
        count = len(logits_at)
        if not count:  # what nobody reads the compiler leaves out, and with it what attention writes to the pools
            logits_at = torch.full((1,), len(ids_n) - 1, dtype=logits_at.dtype, device=logits_at.device)
        if overlay is not None:
            logits = self._overlaid(ids_n, positions_3n, *overlay, logits_at)
        elif sees_n is None:
            logits = self._blind(ids_n, positions_3n, logits_at)
        else:
            logits = self._seeing(ids_n, positions_3n, sees_n, logits_at)
        return logits[:count]


class _Opaque(TorchVarlen):
    """`Attention` that a compiler does not look into.

    Attributes:
        attention: which attends.
    """

    attention: Attention

    def __init__(self) -> None:
        number = next(_numbers)

        # What they write to the pools is not among their arguments: nothing else reads it, and every layer's output is
        # part of every row's logits, so none can be left out.
        @torch.library.custom_op(f"chiasm::attend_self_{number}", mutates_args=())
        def attend_self(q_nhd: Tensor, k_nkd: Tensor, v_nkd: Tensor, layer: int) -> Tensor:
            return self.attention.attend_self(q_nhd, k_nkd, v_nkd, layer=layer)

        @torch.library.custom_op(f"chiasm::attend_cross_{number}", mutates_args=())
        def attend_cross(q_nhd: Tensor, layer: int) -> Tensor:
            return self.attention.attend_cross(q_nhd, layer=layer)

        attend_self.register_fake(lambda q_nhd, k_nkd, v_nkd, layer: torch.empty_like(q_nhd))
        attend_cross.register_fake(lambda q_nhd, layer: torch.empty_like(q_nhd))
        self._self, self._cross = attend_self, attend_cross

    def attend_self(self, q_nhd: Tensor, k_nkd: Tensor, v_nkd: Tensor, *, layer: int) -> Tensor:
        out: Tensor = self._self(q_nhd, k_nkd, v_nkd, layer)
        return out

    def attend_cross(self, q_nhd: Tensor, *, layer: int) -> Tensor:
        out: Tensor = self._cross(q_nhd, layer)
        return out

    def plan(self, step: object) -> None:
        raise AssertionError("the attention itself is planned")
