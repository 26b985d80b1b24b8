"""What FlashInfer's paged wrappers do with a plan, written out in float64 on any device.

It takes the names and keywords of flashinfer-python 0.6.13 and nothing else, gathers pages exactly as the kernels do
(by indptr, indices and last_page_len, through whatever strides the cache has), and answers with the same results: the
rows, and on request the log-sum-exp of their scaled logits to base 2. It stands in for the package `flashinfer` where
there is no device for it.

A wrapper made for CUDA graphs reads its buffers when it runs, as captured kernels would, and holds its caller to what
makes a captured launch the right one: as many parts and rows as before, and buffers that hold what was planned.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


class Interpreter:
    """Stands in for the package `flashinfer`.

    Attributes:
        calls: of every `run` in order, which wrapper and the rows and tokens of each part.
        plans: of every `plan` in order, the pages in each part.
        wrappers: all that were made.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[tuple[int, int]]]] = []
        self.plans: list[list[int]] = []
        self.wrappers: list[_Wrapper] = []
        self.BatchPrefillWithPagedKVCacheWrapper = partial(_Prefill, self)
        self.BatchDecodeWithPagedKVCacheWrapper = partial(_Decode, self)
        self.merge_state = merge_state


class _Wrapper:
    """What both wrappers share: the parts of a plan, and how they are run."""

    kind = ""

    def __init__(
        self,
        kernels: Interpreter,
        *,
        float_workspace_buffer: Tensor,
        kv_layout: str,
        backend: str,
        use_cuda_graph: bool = False,
        buffers: tuple[Tensor | None, ...],
    ) -> None:
        assert float_workspace_buffer.dtype == torch.uint8 and not float_workspace_buffer.any()
        assert (kv_layout, backend) == ("NHD", "fa2")
        assert all((buffer is not None) == use_cuda_graph for buffer in buffers)
        self._kernels = kernels
        self._buffers = [buffer for buffer in buffers if buffer is not None]
        """Row offsets, page offsets, last pages and pages, of a wrapper made for graphs."""
        kernels.wrappers.append(self)
        if use_cuda_graph:
            qo_indptr, indptr, last_page_len, _ = self._buffers
            assert all(buffer.dtype == torch.int32 for buffer in self._buffers)
            assert len(indptr) == len(qo_indptr) == len(last_page_len) + 1
            self._fixed_rows: int | None = None

    def _take(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, page_size: int, qo_indptr: Tensor, causal: bool
    ) -> None:
        for counts in (indptr, indices, last_page_len, qo_indptr):
            assert counts.dtype == torch.int32 and counts.device.type == "cpu"
        assert len(qo_indptr) == len(indptr) == len(last_page_len) + 1 and len(indices) == indptr[-1]
        self._kernels.plans.append((indptr[1:] - indptr[:-1]).tolist())
        self._page_size = page_size
        self._causal = causal
        self._planned = [part.clone() for part in (qo_indptr, indptr, last_page_len, indices)]
        if self._buffers:
            rows = int(qo_indptr[-1])
            assert len(last_page_len) == len(self._buffers[2]), "the number of parts is fixed"
            assert self._fixed_rows in (None, rows), "the number of rows is fixed"
            self._fixed_rows = rows
            assert len(indices) <= len(self._buffers[3]), "more pages than the buffer holds"
            for buffer, part in zip(self._buffers, self._planned, strict=True):
                buffer[: len(part)].copy_(part)
        self._read()

    def _read(self) -> None:
        """What the kernels find on the device: their buffers, or what was planned where they have none."""
        if self._buffers:
            for buffer, part in zip(self._buffers, self._planned, strict=True):
                assert torch.equal(buffer[: len(part)], part), "a buffer holds what was not planned"
        qo_indptr, indptr, last_page_len, indices = self._planned
        page_size = self._page_size
        self._parts = [
            (
                slice(int(qo_indptr[i]), int(qo_indptr[i + 1])),
                indices[indptr[i] : indptr[i + 1]].long(),
                max(int(indptr[i + 1] - indptr[i]) - 1, 0) * page_size + int(last_page_len[i]),
            )
            for i in range(len(last_page_len))
        ]

    def _plan(self, *, heads: int, kv_heads: int, head_dim: int, sm_scale: float, dtypes: set[torch.dtype]) -> None:
        self._shape = (heads, kv_heads, head_dim)
        self._scale = sm_scale
        (self._dtype,) = dtypes

    def run(self, *, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], return_lse: bool) -> Any:
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:2], dtype=torch.float32)
        with _disable_current_modes():  # who notes the operations of a step notes nothing of what a kernel does
            self._run(q, paged_kv_cache, out, lse)
        return (out, lse) if return_lse else out

    def _run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], out: Tensor, lse: Tensor) -> None:
        self._read()
        self._kernels.calls.append((self.kind, [(rows.stop - rows.start, length) for rows, _, length in self._parts]))
        heads, kv_heads, head_dim = self._shape
        assert q.shape == (self._parts[-1][0].stop, heads, head_dim) and q.dtype == self._dtype
        keys, values = paged_kv_cache
        assert keys.stride() == values.stride() and keys.stride(3) == 1
        for cache in (keys, values):
            assert cache.shape[1:] == (self._page_size, kv_heads, head_dim) and cache.dtype == self._dtype
        for rows, pages, length in self._parts:
            if rows.stop == rows.start:
                continue
            k, v = (
                cache[pages].flatten(0, 1)[:length].double().repeat_interleave(heads // kv_heads, dim=1)
                for cache in (keys, values)
            )
            scores = torch.einsum("nhd,shd->hns", q[rows].double(), k) * self._scale
            if self._causal:  # aligned at the end: the last row sees everything
                count = scores.shape[1]
                last = torch.arange(count).unsqueeze(1) + length - count
                scores = scores.masked_fill(torch.arange(length) > last, -torch.inf)
            out[rows] = torch.einsum("hns,shd->nhd", scores.softmax(-1), v).to(q.dtype)
            lse[rows] = (scores.logsumexp(-1) / math.log(2)).T.float()


class _Prefill(_Wrapper):
    """`BatchPrefillWithPagedKVCacheWrapper`."""

    kind = "prefill"

    def __init__(
        self,
        kernels: Interpreter,
        *,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        **rest: Any,
    ) -> None:
        buffers = (qo_indptr_buf, paged_kv_indptr_buf, paged_kv_last_page_len_buf, paged_kv_indices_buf)
        super().__init__(kernels, buffers=buffers, **rest)

    def plan(
        self,
        *,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        self._take(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size, qo_indptr, causal)
        self._plan(
            heads=num_qo_heads,
            kv_heads=num_kv_heads,
            head_dim=head_dim_qk,
            sm_scale=sm_scale,
            dtypes={q_data_type, kv_data_type},
        )


class _Decode(_Wrapper):
    """`BatchDecodeWithPagedKVCacheWrapper`."""

    kind = "decode"

    def __init__(
        self,
        kernels: Interpreter,
        *,
        use_tensor_cores: bool,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        **rest: Any,
    ) -> None:
        rows = None
        if paged_kv_indptr_buffer is not None:  # its own, never written again
            rows = torch.arange(len(paged_kv_indptr_buffer), dtype=torch.int32)
        buffers = (rows, paged_kv_indptr_buffer, paged_kv_last_page_len_buffer, paged_kv_indices_buffer)
        super().__init__(kernels, buffers=buffers, **rest)
        self.use_tensor_cores = use_tensor_cores

    def plan(
        self,
        *,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        rows = torch.arange(len(last_page_len) + 1, dtype=torch.int32)
        self._take(indptr, indices, last_page_len, page_size, rows, causal=False)
        self._plan(
            heads=num_qo_heads,
            kv_heads=num_kv_heads,
            head_dim=head_dim,
            sm_scale=sm_scale,
            dtypes={q_data_type, kv_data_type},
        )


def merge_state(*, v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """As the kernel does it, which has no answer (NaN) where both are minus infinity."""
    most = torch.maximum(s_a, s_b)
    a, b = torch.exp2(s_a - most), torch.exp2(s_b - most)
    whole = a + b
    out = (a / whole).unsqueeze(-1) * v_a.float() + (b / whole).unsqueeze(-1) * v_b.float()
    return out.to(v_a.dtype), torch.log2(whole) + most
