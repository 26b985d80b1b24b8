"""CUDA graphs without CUDA: what is captured is run again, and must be what was captured.

A real graph launches the same kernels on the same memory, whatever has become of the objects that made them. So every
operation of a replay is held against the capture: its name, its shapes, and the addresses of all that was there before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from chiasm.attention.choose import AttentionName
from chiasm.attention.flashinfer_backend import FlashInferAttention
from chiasm.attention.flashinfer_fixed import FixedAttention
from chiasm.attention.pages import Pools
from chiasm.models.family import DecoderHalf
from decoder_service.compiled import Compiled
from decoder_service.forward import EagerForward
from decoder_service.graphs import GraphForward
from tests.attention.flashinfer_interpreter import Interpreter


class Noted(TorchDispatchMode):
    """Notes every operation.

    Attributes:
        calls: of each operation its name, and of each tensor it takes its shape, its strides and where it lies: an
            address for what was there before, None for what came up in between.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[object, ...]] = []
        self._made: dict[int, Tensor] = {}  # kept, so that no address comes up twice

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        taken = [_storage(x) for x in _tensors((args, kwargs))]
        noted = [
            (tuple(x.shape), x.stride(), None if _storage(x) in self._made else x.data_ptr())
            for x in _tensors((args, kwargs))
        ]
        self.calls.append((str(func), *noted))
        for x in _tensors(out):
            if _storage(x) not in taken:
                self._made[_storage(x)] = x
        return out


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


class Played:
    """`Device` on which graphs are functions.

    Args:
        captures: how many succeed before one fails.

    Attributes:
        captured: graphs.
        log: what was asked of it, in order.
    """

    def __init__(self, captures: int = 1_000) -> None:
        self.captured = 0
        self.log: list[str] = []
        self._captures = captures

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        self.log.append("capture")
        run()
        if self.captured == self._captures:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.captured += 1
        with Noted() as captured:
            run()

        def replay() -> None:
            self.log.append("replay")
            with Noted() as again:
                run()
            for now, then in zip(again.calls, captured.calls, strict=True):
                assert now == then, "what is launched is not what was captured"

        return replay

    def mark(self) -> None:
        self.log.append("mark")

    def wait(self) -> None:
        self.log.append("wait")


class Interpreted:
    """`MakeForward` with FlashInfer's kernels interpreted.

    Args:
        largest_table: of the graphs.

    Attributes:
        forward: what was made.
    """

    forward: GraphForward

    def __init__(self, device: Played | None = None, *, largest_table: int = 1 << 16) -> None:
        self.device = device or Played()
        self.kernels = Interpreter()
        self._largest_table = largest_table

    def __call__(
        self,
        half: DecoderHalf,
        pools: Pools,
        attention: AttentionName,
        *,
        graph_rows: int,
        compiled: bool,
        deterministic: bool,
    ) -> GraphForward:
        compute = Compiled(half) if compiled else half.forward
        workspace = torch.zeros(16, dtype=torch.uint8)
        eager = EagerForward(
            half,
            FlashInferAttention(pools, heads=half.heads, kernels=self.kernels, workspace=workspace),
            pools.features,
            compute=compute,
        )
        fixed = FixedAttention(
            pools,
            heads=half.heads,
            kernels=self.kernels,
            workspace=workspace,
            most_rows=graph_rows,
            largest_table=self._largest_table,
        )
        self.forward = GraphForward(half, compute, eager, fixed, self.device)
        return self.forward
