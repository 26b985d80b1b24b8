"""What the entries of a model must be, said once for the half that makes them and the half that reads them."""

from __future__ import annotations

import torch

from chiasm.cache.entry import Contract, Identity
from chiasm.cache.sealed import EntryKey
from chiasm.models.family import EntryShape, Grid, Processor


def identity_of(shape: EntryShape, processor: Processor, *, fingerprint: str, dtype: torch.dtype) -> Identity:
    """What all entries of a model have in common, from `Checkpoint.fingerprint` and what shapes its entries."""
    return Identity(fingerprint, processor.describe(), shape.form, dtype)


def contract_of(
    shape: EntryShape, processor: Processor, *, key: EntryKey, identity: bytes, dtype: torch.dtype, grid: Grid
) -> Contract:
    """What the entry of one unit of that grid is."""
    tokens = processor.unit_layout(grid).vision_tokens
    return Contract(key, identity, shape.form, dtype, grid, shape.of(tokens))
