"""Where the weights of a half are: on its device, block by block on it, or off it altogether.

A half that is loaded has its weights on its device: all of them, or, where its blocks are streamed, a few blocks and
whatever is outside of the blocks (embeddings, head, mergers). Offloaded it has none there, and computes nothing. It
knows halves as modules, and nobody who computes with them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from chiasm.layers.stack import Stack
from chiasm.models.carrying import Carrier, carrier
from chiasm.models.family import DecoderHalf, EncoderHalf
from chiasm.models.parts import Part, become
from chiasm.models.streaming import LEAST, StreamedBlocks, Streaming
from chiasm.settings import SettingsError

_KEPT_UNDER = "_residence"
"""Attribute of a half."""


class Residence:
    """The weights of one half. Used by one thread at a time, and by none while the half computes.

    Args:
        carries: brings them; by default what there is for the device.
        resident_blocks: of each stack that many blocks are on the device at a time; None for all, which are then no
            less outside than the rest. A stack of a single block is outside too.

    A parameter that is on `meta` is given memory here, but not filled: outside of the blocks on the device, in a block
    where it is kept.

    Attributes:
        here: whether the half can compute.
        streamed: the stacks whose blocks come one by one.
        kept: by its name, where each parameter of a streamed block is kept.
    """

    def __init__(
        self,
        half: nn.Module,
        device: torch.device,
        carries: Carrier | None = None,
        *,
        resident_blocks: int | None = None,
    ) -> None:
        self._half = half
        self._carrier = carries or carrier(device)
        self.streamed: list[StreamedBlocks] = []
        self.here = True
        self.kept: dict[str, Tensor] = {}
        for name, stack in stacks(half) if resident_blocks is not None else ():
            assert resident_blocks is not None
            streamed = StreamedBlocks([*stack], self._carrier, device, resident=resident_blocks)
            for number, block in enumerate(stack):
                names = (f"{name}.{number}.{parameter}" for parameter, _ in block.named_parameters())
                self.kept |= zip(names, streamed.views(number), strict=True)
            self.streamed.append(streamed)
        outside = [parameter for name, parameter in half.named_parameters() if name not in self.kept]
        for parameter in outside:
            if parameter.is_meta:
                shape, stride, dtype = parameter.shape, parameter.stride(), parameter.dtype
                become(parameter, torch.empty_strided(shape, stride, dtype=dtype, device=device))
        self._outside = Part(outside, device)
        self._outside_kept: Tensor | None = None

    @classmethod
    def of(cls, half: EncoderHalf | DecoderHalf) -> Residence:
        """Of a half, one for all who ask. Where nobody has streamed its blocks it is on its device as a whole; what is
        no module has no weights."""
        made = vars(half).get(_KEPT_UNDER)
        if not isinstance(made, cls):
            made = cls(half if isinstance(half, nn.Module) else nn.Module(), half.device)
            vars(half)[_KEPT_UNDER] = made
        return made

    @property
    def streams(self) -> bool:
        """Whether only some of its blocks are on the device at a time."""
        return bool(self.streamed)

    def begin(self) -> None:
        """The half is filled: from here on its blocks come when they are called, and `of` finds this."""
        vars(self._half)[_KEPT_UNDER] = self
        for streamed in self.streamed:
            streamed.load()

    def offload(self) -> None:
        """Takes all weights off the device, and gives its memory back. They never change, so what is kept on the host
        is copied once. Raises SettingsError if the host has no room for them; nothing is then changed."""
        if not self.here:
            return
        self._carrier.settle()
        if self._outside_kept is None:
            (kept,) = self._carrier.keep([self._outside.nbytes])
            self._outside.copy_to(kept)
            self._outside_kept = kept
        self.here = False
        self._outside.away()
        self._carrier.leave(self._outside_kept)
        for streamed in self.streamed:
            streamed.offload()
        self._carrier.freed()

    def load(self) -> None:
        """Brings them back. Raises what torch raises if the device has no room for them; they are then still away, and
        may be loaded later."""
        if self.here:
            return
        assert self._outside_kept is not None
        room = self._carrier.room(self._outside.nbytes)
        try:
            for streamed in self.streamed:
                streamed.load()
            outside = self._carrier.fetch(self._outside_kept, room)()
        except Exception:
            for streamed in self.streamed:
                streamed.offload()
            raise
        self._outside.put(self._outside.views(outside))
        self.here = True


def stacks(half: nn.Module) -> list[tuple[str, Stack]]:
    """The stacks of a half of more blocks than one, by their names."""
    found = [(name, module) for name, module in half.named_modules() if isinstance(module, Stack)]
    return [(name, stack) for name, stack in found if len(stack) >= LEAST]


def streamed(half: nn.Module, device: torch.device, streaming: Streaming) -> Residence:
    """The weights of a half that was made on `meta`, for its blocks to be streamed. Raises SettingsError if the host
    has no room for them."""
    carries = carrier(device, directory=streaming.directory, pin_memory=streaming.pin_memory)
    return Residence(half, device, carries, resident_blocks=streaming.resident_blocks)


def not_captured() -> SettingsError:
    """Of a half whose blocks are streamed."""
    return SettingsError(
        "a CUDA graph reads weights where they were when it was captured, and streamed blocks are elsewhere each time",
        "--layerwise-offload",
        "leave out --cuda-graphs, or --layerwise-offload if the weights fit",
    )
