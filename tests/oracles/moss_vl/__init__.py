"""The MOSS-VL oracle: what the reference implementation returned for a tiny checkpoint, and the comparison with it.

`python -m tests.oracles.moss_vl` compares any folder of the format that `data/README.md` describes.
"""

from __future__ import annotations

from pathlib import Path

DATA = Path(__file__).parent / "data"
"""The recorded folder that comes with the tests: inputs and expected tensors, the checkpoint beside them."""

CHECKPOINT = DATA / "checkpoint"
