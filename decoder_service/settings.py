"""How a decoder runs."""

from __future__ import annotations

from typing import Literal

from pydantic import ByteSize, Field

from chiasm.settings import WorkerSettings


class DecoderSettings(WorkerSettings):
    """The decoder service: attaches the entries of the node's arena and draws answers."""

    text_tokens: int | None = Field(
        default=None,
        ge=1,
        description="what the pool of text tokens holds; default: four contexts, within --pool-bytes",
    )
    visual_tokens: int | None = Field(
        default=None,
        ge=1,
        description="what the pool of visual tokens holds; default: four contexts, within --pool-bytes",
    )
    pool_bytes: ByteSize = Field(
        default=ByteSize(2 << 30), gt=0, description="of each pool, where its tokens are not given"
    )
    forms: Literal["auto", "cross_kv", "states", "cross_kv_int8", "cross_kv_fp8"] = Field(
        default="auto",
        description="the form of entries it asks for; auto: keys and values or the smaller states, as is measured to "
        "be quicker; forms of 8 bits change numbers and are never chosen by themselves",
    )
    attention: Literal["auto", "torch", "flashinfer"] = Field(
        default="auto", description="which kernels attend; auto: FlashInfer on CUDA where it can, else torch's"
    )
    cuda_graphs: bool | None = Field(
        default=None,
        description="replay decode steps as CUDA graphs; default: on CUDA, where FlashInfer's kernels attend",
    )
    graph_rows: int = Field(
        default=64, ge=1, le=512, description="rows of the largest decode step that is a CUDA graph"
    )
    compile: bool = Field(
        default=False, description="let torch compile what is not attention; the first steps of each kind wait for it"
    )
    deterministic: bool = Field(
        default=False,
        description="logits are the same, bit by bit, whatever else is computed; slower, most so for long prompts",
    )
    condition_layers: int | None = Field(
        default=None,
        ge=1,
        description="keep so many of the decoder's layers and nothing behind them: states are served, answers are not",
    )
    states_bytes: ByteSize = Field(
        default=ByteSize(1 << 30),
        gt=0,
        description="of states after layers that are gathered and sent at a time; further requests wait",
    )
    max_rows: int = Field(default=512, ge=1, description="rows of one step, over all timelines")
    max_units: int = Field(default=64, ge=1, description="visual units attached in one step, over all timelines")
    max_running: int = Field(
        default=256, ge=1, description="answers that have room at the same time; further ones wait"
    )
    max_waiting: int = Field(
        default=256, ge=1, description="timelines that may wait for room; further ones are refused"
    )
    max_waiting_tokens: int = Field(
        default=1 << 22,
        ge=1,
        description="tokens of those that wait; while they have so many, others are refused",
    )
