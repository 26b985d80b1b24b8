"""The attention of serving on a CUDA device, by FlashInfer's paged kernels. The plan is made once a step, in numpy.

No copy stands between pools and kernels. A layer's self pool is (tokens, kv heads, dim), which is FlashInfer's NHD once
its tokens are cut into pages. A layer's cross pool is (kv heads, slots, dim), because that is how an entry lies; the
kernels read both pools by their strides, so a transposed view of it is NHD with pages of one token.

Every call is made with FlashInfer's `fa2` kernels. They split the keys of few rows over the whole device, which decode
steps and questions about one long video need, and which the `fa3` kernels of 0.6.13 do not; left to itself a wrapper
chooses once, at its first plan. The names and keywords are those of flashinfer-python 0.6.13.

The vision transformer's attention stays with torch: its sequences are short and equal, and its heads have sizes that
FlashInfer does not build.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from chiasm.attention.backend import Step
from chiasm.attention.flashinfer_fixed import FixedAttention
from chiasm.attention.flashinfer_kernels import Kernels, shape, tensor_cores
from chiasm.attention.flashinfer_plan import PagedPlan, plan_cross, plan_self
from chiasm.attention.pages import Pools
from chiasm.attention.torch_backend import TorchVarlen


class FlashInferAttention(TorchVarlen):
    """`Attention` over `Pools`.

    Args:
        heads: query heads, a multiple of the pools' key heads.
        kernels: the package `flashinfer`.
        workspace: bytes on the pools' device, zeroed (`flashinfer_plan.workspace_bytes`). All calls share it: they run
            one after another.
    """

    def __init__(self, pools: Pools, *, heads: int, kernels: Kernels, workspace: Tensor) -> None:
        self._pools = pools
        self._heads = heads
        self._kernels = kernels
        self._workspace = workspace
        self._merge = kernels.merge_state
        size = pools.page_size
        self._self = _Paged(pools.self_kv.unflatten(2, (-1, size)), heads, kernels, workspace, causal=True)
        cross_kv = pools.cross_kv.transpose(2, 3).unsqueeze(3)
        self._common = _Paged(cross_kv, heads, kernels, workspace, causal=False)
        self._rest = _Paged(cross_kv, heads, kernels, workspace, causal=False)
        self._written = torch.empty(0, dtype=torch.long)
        self._looks: list[tuple[bytes, tuple[tuple[int, int, int], ...]]] | None = None  # what the rows look at

    def fixed(self, most_rows: int) -> FixedAttention:
        """The same kernels for decode steps of at most so many rows, in a form that CUDA graphs can capture. The pools
        must have a spare page and slot, and the workspace the size that so many fixed rows need."""
        return FixedAttention(
            self._pools, heads=self._heads, kernels=self._kernels, workspace=self._workspace, most_rows=most_rows
        )

    def plan(self, step: Step) -> None:
        own = plan_self(step, self._pools.page_size)
        self._written = torch.from_numpy(own.written).to(self._pools.self_kv.device)
        self._self.plan(own.parts, step.rows)
        looks = [(part.boundaries.tobytes(), tuple(part.extents)) for part in step.sequences]
        if looks == self._looks:
            return  # sequences that draw text look at the same tokens step after step
        self._looks = None
        cross = plan_cross(step)
        self._common.plan(cross.common, step.rows)
        self._rest.plan(cross.rest, step.rows)
        self._looks = looks

    def attend_self(self, q_nhd: Tensor, k_nkd: Tensor, v_nkd: Tensor, *, layer: int) -> Tensor:
        if not self._self.planned:
            return torch.empty_like(q_nhd)
        keys, values = self._pools.self_kv[layer]
        keys[self._written] = k_nkd
        values[self._written] = v_nkd
        return self._self.run(q_nhd, layer)

    def attend_cross(self, q_nhd: Tensor, *, layer: int) -> Tensor:
        common, rest = self._common, self._rest
        if rest.planned and common.planned:
            return self._merged(q_nhd, layer)
        part = common if common.planned else rest
        if not part.planned:
            return torch.zeros_like(q_nhd)
        if part.rows is None:
            return part.run(q_nhd, layer)
        out = torch.zeros_like(q_nhd)
        out[part.rows] = part.run(q_nhd, layer)
        return out

    def _merged(self, q_nhd: Tensor, layer: int) -> Tensor:
        """What a row has in common with its block, and what it sees beyond. A row that is in the rest alone merges with
        a log-sum-exp of minus infinity, which weighs nothing."""
        out = torch.zeros_like(q_nhd)
        lse_nh = torch.full(q_nhd.shape[:2], -torch.inf, dtype=torch.float32, device=q_nhd.device)
        for part in (self._common, self._rest):
            at = slice(None) if part.rows is None else part.rows
            seen, seen_lse = part.run_with_lse(q_nhd, layer)
            if part is self._rest:
                seen, seen_lse = self._merge(v_a=out[at], s_a=lse_nh[at], v_b=seen, s_b=seen_lse)
            out[at], lse_nh[at] = seen, seen_lse
        return out


class _Paged:
    """Parts of a step over one pool: planned, then run for each layer.

    Args:
        kv: (layers, K|V, pages, page size, kv heads, dim), of any strides but dim's.
        causal: a part's last row sees all its tokens, the row before it all but one, and so on.

    Attributes:
        rows: the step's rows that take part, in the kernels' order; None where that is all of them as they stand.
        planned: the step has parts here.
    """

    def __init__(self, kv: Tensor, heads: int, kernels: Kernels, workspace: Tensor, *, causal: bool) -> None:
        self._layers = [(keys, values) for keys, values in kv]
        self._pages, self._page_size, kv_heads, self._head_dim = kv.shape[2:]
        self._causal = causal
        self._prefill = kernels.BatchPrefillWithPagedKVCacheWrapper(
            float_workspace_buffer=workspace, kv_layout="NHD", backend="fa2"
        )
        self._decode = kernels.BatchDecodeWithPagedKVCacheWrapper(
            float_workspace_buffer=workspace,
            kv_layout="NHD",
            use_tensor_cores=tensor_cores(heads, kv_heads),
            backend="fa2",
        )
        self._shared = shape(kv, heads)
        self._device = kv.device
        self._wrapper = self._decode
        self.rows: Tensor | None = None
        self.planned = False

    def plan(self, parts: PagedPlan | None, step_rows: int) -> None:
        self.planned = parts is not None
        if parts is None:
            return
        parts.check(step_rows=step_rows, pages=self._pages)
        assert parts.page_size == self._page_size, (parts.page_size, self._page_size)
        in_place = np.array_equal(parts.rows, np.arange(step_rows))
        self.rows = None if in_place else torch.from_numpy(parts.rows).to(self._device)
        # The wrappers want these on the host, where they count with them, and copy them to the device themselves.
        indptr, indices, last = (torch.from_numpy(x) for x in (parts.indptr, parts.indices, parts.last_page_len))
        if parts.one_row_each:
            self._wrapper = self._decode
            self._decode.plan(
                indptr=indptr, indices=indices, last_page_len=last, head_dim=self._head_dim, **self._shared
            )
        else:
            self._wrapper = self._prefill
            self._prefill.plan(
                qo_indptr=torch.from_numpy(parts.qo_indptr),
                paged_kv_indptr=indptr,
                paged_kv_indices=indices,
                paged_kv_last_page_len=last,
                head_dim_qk=self._head_dim,
                causal=self._causal,
                **self._shared,
            )

    def run(self, q_nhd: Tensor, layer: int) -> Tensor:
        """(rows here, heads, dim) from the (step's rows, heads, dim) queries."""
        out: Tensor = self._wrapper.run(q=self._own(q_nhd), paged_kv_cache=self._layers[layer], return_lse=False)
        return out

    def run_with_lse(self, q_nhd: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """As `run`, and the (rows here, heads) log-sum-exp to base 2."""
        out, lse_nh = self._wrapper.run(q=self._own(q_nhd), paged_kv_cache=self._layers[layer], return_lse=True)
        return out, lse_nh

    def _own(self, q_nhd: Tensor) -> Tensor:
        return q_nhd if self.rows is None else q_nhd[self.rows]
