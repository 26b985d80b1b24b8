"""Parameters that come and go together, and how they lie in one run of bytes.

Each lies as its layer has laid it, so that it is computed with in the same order wherever the bytes are: results are
the same bits. A parameter that is away has its shape, its type and its device, takes no memory and reads as NaN.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from chiasm.models.carrying import ALIGNED


class Part:
    """Some parameters of a half.

    Args:
        parameters: those on `meta` say how they are to be laid on `device`, and are away until they are put somewhere.

    Attributes:
        nbytes: of the run of bytes that holds them.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], device: torch.device) -> None:
        self._parameters = [*parameters]
        self._shapes = [(p.shape, p.stride(), p.dtype) for p in self._parameters]
        self._starts: list[int] = []
        self.nbytes = 0
        for parameter in self._parameters:
            self._starts.append(self.nbytes)
            self.nbytes += -(-parameter.nbytes // ALIGNED) * ALIGNED
        nothing = {dtype: torch.full((), torch.nan, dtype=dtype, device=device) for _, _, dtype in self._shapes}
        self._away = [nothing[dtype].expand(shape) for shape, _, dtype in self._shapes]
        for parameter, away in zip(self._parameters, self._away, strict=True):
            if parameter.is_meta:
                become(parameter, away)

    def views(self, data: Tensor) -> list[Tensor]:
        """Each parameter in (nbytes,) uint8."""
        return [
            data[start : start + shape.numel() * dtype.itemsize].view(dtype).as_strided(shape, stride)
            for start, (shape, stride, dtype) in zip(self._starts, self._shapes, strict=True)
        ]

    def put(self, views: Iterable[Tensor]) -> None:
        """Lets the parameters be these `views`."""
        for parameter, view in zip(self._parameters, views, strict=True):
            parameter.data = view

    def away(self) -> None:
        """Lets the parameters be nowhere. Whatever held them alone is freed."""
        self.put(self._away)

    def copy_to(self, data: Tensor) -> None:
        """Copies the parameters into (nbytes,) uint8, from wherever they are."""
        for view, parameter in zip(self.views(data), self._parameters, strict=True):
            view.copy_(parameter.data)


def become(parameter: nn.Parameter, tensor: Tensor) -> None:
    """Lets a parameter that is on `meta` be a tensor of another device. It stays the object that layers know."""
    torch.utils.swap_tensors(parameter, nn.Parameter(tensor, requires_grad=parameter.requires_grad))
