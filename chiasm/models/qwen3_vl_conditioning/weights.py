"""The tensors of a Qwen3-VL checkpoint that are kept when its decoder is cut, and those that are known and not read.

Every tensor of the whole is in one of the two lists; any other is an error, as it is of the whole. No torch code runs
here.
"""

from __future__ import annotations

import re

from chiasm.models.qwen3_vl import weights as whole
from chiasm.models.qwen3_vl_conditioning.config import Config
from chiasm.models.weights import Weight, WeightTable

_LAYER = re.compile(r"layers\.(\d+)\.")


def weight_table(config: Config) -> WeightTable:
    """That of the whole, but for the last norm, the head and the layers behind the cut, which are left where they lie.
    A head that is the table of embeddings may be stored under both names, and is compared as in the whole."""
    table = whole.weight_table(config.whole)
    left = [weight for weight in table.weights if _is_left(weight, config.layers)]
    names = {part.name for weight in left for way in weight.ways for part in way}
    return WeightTable(tuple(weight for weight in table.weights if weight not in left), frozenset(names))


def _is_left(weight: Weight, layers: int) -> bool:
    if weight.half != "decoder":
        return False
    number = _LAYER.match(weight.parameter)
    if number is not None:
        return int(number[1]) >= layers
    return weight.parameter in ("norm.weight", whole.HEAD)
