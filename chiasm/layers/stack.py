"""Blocks that are computed one after another.

Whoever decides where weights are finds by this type what of a model comes and goes block by block
(`chiasm.models.streaming`). It knows no block.
"""

from __future__ import annotations

from torch import nn


class Stack(nn.ModuleList):
    """The blocks of a transformer, in the order in which they are called. A call may leave some of them out."""
