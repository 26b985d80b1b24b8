"""How an encoder runs."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic_settings import NoDecode

from chiasm.cache.form import Form
from chiasm.settings import WorkerSettings
from encoder_service.bounds import MAX_PATCHES, MAX_UNITS, PATCHES_A_THREAD


def _forms(value: object) -> object:
    """Labels parted by commas, to forms."""
    if not isinstance(value, str):
        return value
    known = {form.label: form for form in Form}
    labels = [label.strip() for label in value.split(",")]
    if len(set(labels)) < len(labels) or not set(labels) <= set(known):
        raise ValueError(f"must be some of {','.join(known)}, each once")
    return tuple(known[label] for label in labels)


class EncoderSettings(WorkerSettings):
    """The encoder service: decodes media, encodes their units and keeps the entries in the node's arena."""

    media_workers: int = Field(
        default=2,
        ge=1,
        le=256,
        description="media that are opened or decoded at a time, each in a process of its own; four times as many "
        "videos may be under way, most of them waiting for the model",
    )
    max_patches: int | None = Field(
        default=None,
        ge=0,
        description="patches of one pass through the vision tower; a larger frame goes alone; 0 for no bound; default: "
        f"{PATCHES_A_THREAD} for each thread on a CPU, else {MAX_PATCHES}",
    )
    max_units: int = Field(
        default=MAX_UNITS, ge=0, description="units of one pass through the vision tower; 0 for no bound"
    )
    max_unit_patches: int = Field(
        default=MAX_PATCHES, ge=0, description="patches of a frame; one of more is refused; 0 for no bound"
    )
    cuda_graphs: bool | None = Field(
        default=None,
        description="replay passes as CUDA graphs; default: on CUDA, where they can be captured",
    )
    graph_patches: int = Field(
        default=4096, ge=256, multiple_of=16, description="patches of the largest pass that is a CUDA graph"
    )
    offer_forms: Annotated[tuple[Form, ...] | None, NoDecode, BeforeValidator(_forms)] = Field(
        default=None,
        description="forms of entries that decoders may ask for, parted by commas, the default first; default: all",
    )
    max_running: int = Field(default=64, ge=1, description="media that are decoded and encoded at a time")
    max_waiting: int = Field(
        default=1024, ge=1, description="media that may wait before that; further ones are refused"
    )
    max_waiting_patches: int = Field(
        default=1 << 24,
        ge=1,
        description="patches of those that wait; while they have so many, others are refused",
    )
    lease_seconds: float = Field(
        default=30.0, gt=0, le=3600, description="how long an entry stays pinned if nobody attaches it"
    )
