"""FlashInfer's kernels at fixed shapes and addresses, so that what they launch can be captured in a CUDA graph.

A decode step is a row of each of several sequences. Its kernels are launched for a *bucket* of rows; rows that are
nobody's fill what a step leaves over, write to the pools' spare page and see nothing. Plans are made in numpy as for
any other step and go into buffers that stay where they are: planning is outside the graph, running inside. As long as
the number of parts and rows is the same, the wrappers launch the same whatever the plan: keys are then always split,
and a mask on the device says which pieces are there (`enable_cuda_graph` in FlashInfer's scheduler.cuh).

Self-attention is the decode kernels', a part for each row. Cross-attention has nothing to merge: rows that look at the
same slots and stand side by side are one part of the prefill kernels, and parts without rows fill the number. A part's
rows are taken 16 query heads of a key head at a time. So 16 questions about one video, with four query heads to a key
head, read its keys four times, all at once and so mostly from the second-level cache, where an eager step reads them
once.

A row that sees nothing looks at the pools' spare slot, which holds zeros: what comes out is zero, as it should be.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chiasm.attention.backend import SequenceRows, Step
from chiasm.attention.flashinfer_kernels import Kernels, Wrapper, shape, tensor_cores
from chiasm.attention.flashinfer_plan import PagedPlan, plan_rows, plan_self
from chiasm.attention.pages import Pools
from chiasm.attention.staged import Staged
from chiasm.attention.torch_backend import TorchVarlen

LARGEST_TABLE = 4 << 20
"""Pages that all rows of a step may look at together: 65,536 visual tokens for each of 64 rows, at four bytes each on
the device and on the host."""


class FixedAttention:
    """What the buckets of one decoder share: pools, kernels, workspace, and the page tables of the step that runs.

    Args:
        pools: with a spare page and slot.
        heads: query heads, a multiple of the pools' key heads.
        workspace: `flashinfer_plan.workspace_bytes` of them is enough for `most_rows`.
        most_rows: of the largest bucket.
    """

    def __init__(
        self,
        pools: Pools,
        *,
        heads: int,
        kernels: Kernels,
        workspace: Tensor,
        most_rows: int,
        largest_table: int = LARGEST_TABLE,
    ) -> None:
        assert pools.spare_page is not None and pools.spare_slot is not None, "rows that are nobody's have no place"
        self.pools = pools
        self.heads = heads
        self.kernels = kernels
        self.workspace = workspace
        self.most_rows = most_rows
        self.nobody = SequenceRows(0, 1, [pools.spare_page], np.zeros((1, 2), np.int64), [])
        self.nowhere = pools.spare_slot
        self.self_kv = pools.self_kv.unflatten(2, (-1, pools.page_size))
        self.cross_kv = pools.cross_kv.transpose(2, 3).unsqueeze(3)
        self.self_table, self.cross_table = (
            Staged(min(largest_table, most_rows * kv.shape[2]), device=workspace.device, dtype=torch.int32)
            for kv in (self.self_kv, self.cross_kv)
        )
        self.looks: object = None  # what the cross layers' table holds, and the bucket it was planned for

    def fits(self, step: Step) -> bool:
        """Whether the page tables hold all that the rows look at, in a step in which each sequence has a row."""
        size = self.pools.page_size
        own = sum(sequence.start // size + 1 for sequence in step.sequences)
        seen = sum(int(last - first) for sequence in step.sequences for first, last in sequence.boundaries)
        tables = self.self_table.numpy, self.cross_table.numpy
        return all(n + self.most_rows <= len(table) for n, table in zip((own, seen), tables, strict=True))

    def bucket(self, rows: int) -> FixedRows:
        """The attention of steps of at most so many rows."""
        return FixedRows(self, rows)


class FixedRows(TorchVarlen):
    """`Attention` of one bucket: steps of at most `rows` sequences with a row each.

    The layers get as many rows as the bucket has. Where no row sees anything, cross-attention is not planned, and the
    cross layers are not to be run. The copies of a plan must be done before the next one: the host's buffers are
    written again.
    """

    def __init__(self, shared: FixedAttention, rows: int) -> None:
        self._shared = shared
        self._rows = rows
        self._written = Staged(rows, device=shared.workspace.device, dtype=torch.long)
        self._self = _Decode(shared, rows)
        self._cross = _Prefill(shared, rows)

    def plan(self, step: Step) -> None:
        assert all(sequence.rows == 1 for sequence in step.sequences), "a sequence adds several rows"
        shared = self._shared
        padded = Step([*step.sequences, *[shared.nobody] * (self._rows - len(step.sequences))])
        own = plan_self(padded, shared.pools.page_size)
        assert own.parts is not None and own.parts.parts == self._rows, "more rows than the bucket has"
        self._written.put(own.written)
        self._self.plan(own.parts)
        looks = (self._rows, [(part.boundaries.tobytes(), tuple(part.extents)) for part in step.sequences])
        if looks == shared.looks or not step.sees().any():
            return  # the table is left as it is, and so is what it is said to hold
        shared.looks = None
        self._cross.plan(plan_rows(padded, nowhere=shared.nowhere))
        shared.looks = looks

    def attend_self(self, q_nhd: Tensor, k_nkd: Tensor, v_nkd: Tensor, *, layer: int) -> Tensor:
        keys, values = self._shared.pools.self_kv[layer]
        keys[self._written.device] = k_nkd
        values[self._written.device] = v_nkd
        return self._self.run(q_nhd, layer)

    def attend_cross(self, q_nhd: Tensor, *, layer: int) -> Tensor:
        return self._cross.run(q_nhd, layer)


class _Fixed:
    """A wrapper of a bucket over one of the pools, with the buffers it was made for. Each takes 8 MiB on the device and
    as much on the host for plans, which is the wrappers' own choice."""

    def __init__(self, shared: FixedAttention, kv: Tensor, table: Staged, rows: int) -> None:
        device = shared.workspace.device
        self._layers = [(keys, values) for keys, values in kv]
        self._pages = kv.shape[2]
        self._table = table
        self._rows = rows
        # The wrappers count with these on the host, and copy them into the buffers they were made with.
        self._indptr, self._last, self._qo_indptr = (
            Staged(n, device=device, dtype=torch.int32) for n in (rows + 1, rows, rows + 1)
        )
        self._shape = shape(kv, shared.heads)
        self._head_dim = kv.shape[-1]
        self._made = {"float_workspace_buffer": shared.workspace, "kv_layout": "NHD", "backend": "fa2"}
        self._wrapper: Wrapper

    def plan(self, parts: PagedPlan) -> None:
        """Takes a plan of at most as many parts as the bucket has rows, and of exactly as many rows."""
        parts.check(step_rows=self._rows, pages=self._pages)
        assert len(parts.rows) == self._rows and (np.diff(parts.rows) == 1).all(), "the rows are not all in place"
        _fill(self._indptr, parts.indptr)
        _fill(self._qo_indptr, parts.qo_indptr)
        self._last.numpy[:] = 1
        self._last.numpy[: parts.parts] = parts.last_page_len
        # Copied from the host by the wrapper, the table would make the host wait for the device.
        _, indices = self._table.put(parts.indices)
        self._plan(indices)

    def _plan(self, indices: Tensor) -> None:
        raise NotImplementedError

    def run(self, q_nhd: Tensor, layer: int) -> Tensor:
        """(rows, heads, dim), for as many rows as the bucket has."""
        out: Tensor = self._wrapper.run(q=q_nhd, paged_kv_cache=self._layers[layer], return_lse=False)
        return out


class _Decode(_Fixed):
    """A part for each row, over the self pool."""

    def __init__(self, shared: FixedAttention, rows: int) -> None:
        super().__init__(shared, shared.self_kv, shared.self_table, rows)
        self._wrapper = shared.kernels.BatchDecodeWithPagedKVCacheWrapper(
            **self._made,
            use_cuda_graph=True,
            use_tensor_cores=tensor_cores(shared.heads, self._shape["num_kv_heads"]),
            paged_kv_indptr_buffer=self._indptr.device,
            paged_kv_indices_buffer=self._table.device,
            paged_kv_last_page_len_buffer=self._last.device,
        )

    def _plan(self, indices: Tensor) -> None:
        self._wrapper.plan(
            indptr=self._indptr.host,
            indices=indices,
            last_page_len=self._last.host,
            head_dim=self._head_dim,
            **self._shape,
        )


class _Prefill(_Fixed):
    """Parts of several rows or none, over the cross pool."""

    def __init__(self, shared: FixedAttention, rows: int) -> None:
        super().__init__(shared, shared.cross_kv, shared.cross_table, rows)
        self._wrapper = shared.kernels.BatchPrefillWithPagedKVCacheWrapper(
            **self._made,
            use_cuda_graph=True,
            qo_indptr_buf=self._qo_indptr.device,
            paged_kv_indptr_buf=self._indptr.device,
            paged_kv_indices_buf=self._table.device,
            paged_kv_last_page_len_buf=self._last.device,
        )

    def _plan(self, indices: Tensor) -> None:
        self._wrapper.plan(
            qo_indptr=self._qo_indptr.host,
            paged_kv_indptr=self._indptr.host,
            paged_kv_indices=indices,
            paged_kv_last_page_len=self._last.host,
            head_dim_qk=self._head_dim,
            causal=False,
            **self._shape,
        )


def _fill(staged: Staged, offsets: npt.NDArray[Any]) -> None:
    """Offsets of parts, and of parts with nothing in them up to the number there must be."""
    staged.numpy[: len(offsets)] = offsets
    staged.numpy[len(offsets) :] = offsets[-1]
