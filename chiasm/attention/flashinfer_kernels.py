"""What is used of the package `flashinfer`, with the names and keywords of flashinfer-python 0.6.13. Loads nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

TENSOR_CORES_FROM = 4
"""Query heads of a key head from which a decode step is faster as products of tiles, for 16-bit keys: the rule of
SGLang's FlashInfer backend (`should_use_tensor_core`)."""


class Wrapper(Protocol):
    """A paged wrapper: planned once a step, run once a layer. All arguments are keywords."""

    @property
    def plan(self) -> Callable[..., None]: ...

    @property
    def run(self) -> Callable[..., Any]:
        """(rows, heads, dim), or with `return_lse` that and its (rows, heads) log-sum-exp to base 2 in float32."""
        ...


class Kernels(Protocol):
    """The package `flashinfer`."""

    @property
    def BatchPrefillWithPagedKVCacheWrapper(self) -> Callable[..., Wrapper]: ...  # noqa: N802 - its name

    @property
    def BatchDecodeWithPagedKVCacheWrapper(self) -> Callable[..., Wrapper]: ...  # noqa: N802 - its name

    @property
    def merge_state(self) -> Callable[..., tuple[Tensor, Tensor]]: ...


def tensor_cores(heads: int, kv_heads: int) -> bool:
    """Whether a decode step is to be computed as products of tiles."""
    return heads // kv_heads >= TENSOR_CORES_FROM


def shape(kv: Tensor, heads: int) -> dict[str, Any]:
    """What every plan over (layers, K|V, pages, page size, kv heads, dim) pools is told of their shape, but for the
    dimension of a head, which each wrapper calls by another name."""
    page_size, kv_heads, head_dim = kv.shape[3:]
    return {
        "num_qo_heads": heads,
        "num_kv_heads": kv_heads,
        "page_size": page_size,
        "sm_scale": head_dim**-0.5,
        "q_data_type": kv.dtype,
        "kv_data_type": kv.dtype,
    }
