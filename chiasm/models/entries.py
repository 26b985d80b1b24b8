"""What the entries of a model must be, said once for the half that makes them and the half that reads them."""

from __future__ import annotations

import torch

from chiasm.cache.entry import Contract, Identity
from chiasm.cache.form import Form
from chiasm.cache.sealed import EntryKey
from chiasm.models.family import EntryShape, Grid, Processor


def identity_of(processor: Processor, *, fingerprint: str, dtype: torch.dtype) -> Identity:
    """What all entries of a model have in common, from `Checkpoint.fingerprint` and how it is computed."""
    return Identity(fingerprint, processor.describe(), dtype)


def contract_of(
    shape: EntryShape,
    processor: Processor,
    *,
    key: EntryKey,
    identity: bytes,
    dtype: torch.dtype,
    grid: Grid,
    form: Form = Form.CROSS_KV,
) -> Contract:
    """What the entry of one unit of that grid is, computed in a type and kept in a form."""
    tokens = processor.unit_layout(grid).vision_tokens
    return Contract(key, identity, form, dtype, grid, shape.of(tokens, form))
