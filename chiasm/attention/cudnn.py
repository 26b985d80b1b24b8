"""cuDNN's attention among torch's own, allowed for as long as a block runs and no longer.

The flag is the process's. Steps run in one thread at a time, so nobody else's step sees it changed. It has never run on
a GPU: what cuDNN makes of these shapes there is not measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def cudnn_attention(device: torch.device) -> Iterator[None]:
    """On CUDA torch may choose cuDNN's kernels inside the block; behind it the flag is as it was. Nothing elsewhere."""
    if device.type != "cuda":
        yield
        return
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
