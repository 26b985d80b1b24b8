"""Which attention a decoder serves with: `auto | torch | flashinfer`, resolved here and nowhere else.

It looks at the device, the numbers' type and the heads, and whether the package is there. It loads `flashinfer` only
when that is what was chosen.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Literal, TypeAlias, cast

import torch

from chiasm.attention.backend import Attention, VarlenAttention
from chiasm.attention.flashinfer_backend import FlashInferAttention
from chiasm.attention.flashinfer_kernels import Kernels
from chiasm.attention.flashinfer_plan import workspace_bytes
from chiasm.attention.invariant_backend import InvariantAttention
from chiasm.attention.pages import Pools
from chiasm.attention.torch_backend import TorchAttention, TorchVarlen
from chiasm.attention.varlen import FlashVarlen
from chiasm.settings import SettingsError

AttentionName: TypeAlias = Literal["auto", "torch", "flashinfer"]

HEAD_DIMS = (64, 128, 256)
"""Head sizes that FlashInfer 0.6.13 builds paged prefill, decode and merging for (`DISPATCH_HEAD_DIM` in its utils.cuh;
it also lists 512, which not all of them have)."""

DTYPES = (torch.float16, torch.bfloat16)
"""What its kernels multiply; float32 is not among them."""


def choose(
    name: AttentionName,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    device: torch.device,
    dtype: torch.dtype,
    deterministic: bool = False,
    installed: bool | None = None,
) -> Literal["torch", "flashinfer"]:
    """Resolves a name. `auto` is FlashInfer wherever that can serve, and torch else.

    Args:
        heads, kv_heads, head_dim: of the model, query heads first.
        device, dtype: of the pools.
        deterministic: what is computed for a row may depend on nothing but that row and what it sees.
        installed: whether the package `flashinfer` is there; looked up where it is not said.

    Raises SettingsError for `flashinfer` where it cannot serve, with the first reason.
    """
    if name == "torch":
        return "torch"
    here = importlib.util.find_spec("flashinfer") is not None if installed is None else installed
    fix = "--attention auto takes what fits"
    if device.type != "cuda":
        hindrance = f"the device is {device.type}, its kernels are for CUDA"
    elif dtype not in DTYPES:
        hindrance = f"the model computes in {dtype}, its kernels in float16 and bfloat16"
    elif head_dim not in HEAD_DIMS:
        hindrance = f"heads have {head_dim} dimensions, its kernels {', '.join(map(str, HEAD_DIMS))}"
    elif heads % kv_heads:
        hindrance = f"{heads} query heads are no multiple of {kv_heads} key heads"
    elif deterministic:
        hindrance = "it splits a sequence's keys by what else is in the step, and results are to be independent of that"
    elif not here:
        hindrance, fix = "the package is not installed", "pip install 'chiasm[gpu]'"
    else:
        return "flashinfer"
    if name == "flashinfer":
        raise SettingsError(f"FlashInfer cannot serve: {hindrance}", "--attention", fix)
    return "torch"


def make(
    name: AttentionName, pools: Pools, *, heads: int, deterministic: bool = False, fixed_rows: int = 0
) -> Attention:
    """The attention of that name over a decoder's pools. Arguments and errors are those of `choose`, and of
    `InvariantAttention`.

    Args:
        fixed_rows: the most rows for which `FlashInferAttention.fixed` will be asked.
    """
    keys = pools.self_kv
    kv_heads, head_dim = keys.shape[3:]
    device, dtype = keys.device, keys.dtype
    chosen = choose(
        name,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        device=device,
        dtype=dtype,
        deterministic=deterministic,
    )
    if deterministic:
        return InvariantAttention(pools, heads=heads)
    if chosen == "torch":
        return TorchAttention(pools)
    size = workspace_bytes(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        multiprocessors=torch.cuda.get_device_properties(device).multi_processor_count,
        fixed_rows=fixed_rows,
    )
    workspace = torch.zeros(size, dtype=torch.uint8, device=device)
    kernels = cast(Kernels, importlib.import_module("flashinfer"))
    return FlashInferAttention(pools, heads=heads, kernels=kernels, workspace=workspace)


def varlen(device: torch.device, dtype: torch.dtype, *, head_dim: int) -> VarlenAttention:
    """The attention inside frames, of an encoder: one flash kernel for frames of all sizes on CUDA, where torch has
    that for the numbers and heads; else torch's usual one, in a call for each run of equal frames.

    FlashInfer is no choice here: see `chiasm.attention.varlen`.
    """
    return FlashVarlen(device) if varlen_fixed(device, dtype, head_dim=head_dim) else TorchVarlen()


def varlen_fixed(device: torch.device, dtype: torch.dtype, *, head_dim: int) -> bool:
    """Whether attention inside frames can be captured in a CUDA graph: whether the flash kernel can be had."""
    return (
        device.type == "cuda"
        and dtype in DTYPES
        and head_dim % 8 == 0
        and head_dim <= 256
        and importlib.util.find_spec("torch.nn.attention.varlen") is not None
    )
