"""Integers that the host writes anew for every step and a device reads, at one address for ever.

What a CUDA graph reads must lie where it lay when the graph was captured, and a copy from pinned memory does not make
the host wait. Nothing here knows what the integers mean.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class Staged:
    """A buffer on a device and its twin on the host.

    The host's twin is read while the copy is under way: who writes again sees to it that the copy before is done.

    Attributes:
        device: what kernels read. Zero before anything is put there.
        host: the same memory as `numpy`, as a tensor.
    """

    def __init__(self, *shape: int, device: torch.device, dtype: torch.dtype) -> None:
        self.host = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
        self.numpy: npt.NDArray[np.integer] = self.host.numpy()
        self.device = torch.zeros(shape, dtype=dtype, device=device)

    def put(self, values: npt.NDArray[np.integer]) -> tuple[Tensor, Tensor]:
        """Writes the first entries. Returns them on the host and on the device, where they come in the order of its
        other work."""
        count = len(values)
        self.numpy[:count] = values
        return self.host[:count], self.send(count)

    def send(self, count: int | None = None) -> Tensor:
        """Copies what is on the host, the first entries or all. Returns it on the device."""
        return self.device[:count].copy_(self.host[:count], non_blocking=True)
