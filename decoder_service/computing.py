"""How a decoder computes its steps, put together in one place: attention, graphs, compilation."""

from __future__ import annotations

from typing import Literal, Protocol

from chiasm.attention.capture import CudaDevice
from chiasm.attention.choose import AttentionName, choose, make
from chiasm.attention.flashinfer_backend import FlashInferAttention
from chiasm.attention.pages import Pools
from chiasm.models.family import DecoderHalf
from chiasm.models.residence import Residence, not_captured
from chiasm.settings import SettingsError
from decoder_service.compiled import Compiled
from decoder_service.fixed_rows import FixedRows
from decoder_service.forward import Compute, EagerForward, Forward
from decoder_service.graphs import GraphForward


class MakeForward(Protocol):
    """What makes a decoder's forward over its pools."""

    def __call__(
        self,
        half: DecoderHalf,
        pools: Pools,
        attention: AttentionName,
        *,
        graph_rows: int,
        compiled: bool,
        deterministic: bool,
    ) -> Forward: ...


def make_forward(
    half: DecoderHalf,
    pools: Pools,
    attention: AttentionName,
    *,
    graph_rows: int,
    compiled: bool,
    deterministic: bool,
) -> Forward:
    """The forward over a decoder's pools.

    Args:
        attention: raises SettingsError for `flashinfer` where that cannot serve.
        graph_rows: the most rows of a step that is replayed as a CUDA graph, with FlashInfer's kernels; 0 for none.
            The torch backend is never captured: its plan decides on the host which tensors of which shapes there are.
        compiled: torch compiles all but the attention, eager steps and graphs alike. A step of which states are wanted
            is computed as it is written: it would be another graph of each kind, for prompts alone.
        deterministic: no row depends on the others (`FixedRows`). Raises SettingsError together with `compiled`, for
            what a compiler makes of an expression depends on its shape.

    Raises SettingsError for graphs or compilation of a half whose blocks are streamed.
    """
    if Residence.of(half).streams:
        if graph_rows:
            raise not_captured()
        if compiled:
            raise SettingsError(
                "a compiled half is one expression of all its weights, and streamed blocks come between its parts",
                "--compile",
                "leave it out, or --layerwise-offload if the weights fit",
            )
    if deterministic:
        if compiled:
            raise SettingsError(
                "results that depend on no other row are not compiled", "--deterministic", "leave out --compile"
            )
        return FixedRows(half, make(attention, pools, heads=half.heads, deterministic=True), pools.features)
    compute: Compute = Compiled(half) if compiled else half.forward
    chosen = make(attention, pools, heads=half.heads, fixed_rows=graph_rows)
    eager = EagerForward(half, chosen, pools.features, compute=compute)
    if not graph_rows or not isinstance(chosen, FlashInferAttention):
        return eager
    return GraphForward(half, compute, eager, chosen.fixed(graph_rows), CudaDevice(half.device))


def attends(
    half: DecoderHalf, attention: AttentionName, *, deterministic: bool = False
) -> Literal["torch", "flashinfer"]:
    """Whose kernels attend in a decoder. Raises as `choose`."""
    return choose(
        attention,
        heads=half.heads,
        kv_heads=half.kv_heads,
        head_dim=half.head_dim,
        device=half.device,
        dtype=half.dtype,
        deterministic=deterministic,
    )


def captured_rows(
    asked: bool | None, rows: int, kernels: Literal["torch", "flashinfer"], *, streams: bool = False
) -> int:
    """The most rows of a step that is to be a CUDA graph; 0 for none.

    Args:
        asked: None for graphs where they can be.
        rows: what it is where there are graphs.
        kernels: whose attend.
        streams: the blocks of the half are streamed.

    Raises SettingsError for graphs that are asked for where they cannot be.
    """
    if asked and streams:
        raise not_captured()
    if asked and kernels != "flashinfer":
        raise SettingsError(
            "CUDA graphs are of FlashInfer's kernels, and torch's attend here",
            "--cuda-graphs",
            "--attention flashinfer says why; without --cuda-graphs there are graphs where there can be",
        )
    return 0 if asked is False or streams or kernels != "flashinfer" else rows
