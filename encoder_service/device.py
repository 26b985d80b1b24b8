"""The model's own thread: pixels in, entries out, one pass after another.

It knows the model's half and how bytes get to its device and back. It knows no key, no store and nobody who waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from chiasm.attention.backend import VarlenAttention
from chiasm.cache.form import Form
from chiasm.failpoints import Step, nowhere
from chiasm.models.family import EncoderHalf, Trunk
from chiasm.models.forms import payloads
from chiasm.pulse import Pulse, PulsedThreads

Entry: TypeAlias = Callable[[], Tensor]
"""Brings the payload of an entry to the host. Called once, in any thread; may wait."""

Wanted: TypeAlias = tuple[Tensor, Form]
"""A resized frame, uint8 RGB (3, height, width), and the form in which its entry is wanted."""


class Copies(Protocol):
    """How bytes get to the device and back."""

    def up(self, pixels: Tensor) -> Tensor:
        """A unit's pixels, where what the model is asked next will find them."""
        ...

    def down(self, entry: Tensor) -> Entry:
        """Begins to bring an entry to the host that the model was asked for last."""
        ...


class NoCopies:
    """`Copies` where device and host are one."""

    def up(self, pixels: Tensor) -> Tensor:
        return pixels

    def down(self, entry: Tensor) -> Entry:
        return lambda: entry


class CudaCopies:
    """`Copies` over pinned memory, on a stream for each way: they run beside the passes and beside each other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._up = torch.cuda.Stream(device)
        self._down = torch.cuda.Stream(device)

    def up(self, pixels: Tensor) -> Tensor:
        model = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._up):
            copied = pixels.pin_memory().to(self._device, non_blocking=True)
        model.wait_stream(self._up)
        copied.record_stream(model)  # or its memory is given to the next copy while the model still reads it
        return copied

    def down(self, entry: Tensor) -> Entry:
        self._down.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._down):
            host = torch.empty(entry.shape, dtype=entry.dtype, pin_memory=True)
            host.copy_(entry.contiguous(), non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._down)
        entry.record_stream(self._down)

        def arrived() -> Tensor:
            done.synchronize()
            return host

        return arrived


class Device:
    """Runs passes of one half, in one thread.

    On a CPU a pass is done when `encode` returns. On a CUDA device it has been asked for, and its entries come when
    they are brought to the host.

    Args:
        trunk: computes what the half's own would, for example from graphs.
        step: is told of `pass`, in the model's thread, before one is computed (`chiasm.failpoints`).
    """

    def __init__(
        self, half: EncoderHalf, attention: VarlenAttention, trunk: Trunk | None = None, *, step: Step = nowhere
    ) -> None:
        self._half = half
        self._attention = attention
        self._trunk = trunk
        self._step = step
        self._copies: Copies = CudaCopies(half.device) if half.device.type == "cuda" else NoCopies()
        self._thread = PulsedThreads(1, "encoder")

    @property
    def pulse(self) -> Pulse:
        """Of the passes."""
        return self._thread.pulse

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Runs something between two passes."""
        return self._thread.submit(work)

    async def encode(self, frames: Sequence[Wanted]) -> list[Entry | Exception]:
        """One pass over frames. If it fails as a whole its frames are tried alone: one frame's fault is its own,
        whoever's frames it was batched with."""
        run = asyncio.get_running_loop().run_in_executor
        try:
            return [*await run(self._thread, self._pass, frames)]
        except Exception as error:
            if len(frames) == 1:
                return [error]
        return [(await self.encode([frame]))[0] for frame in frames]

    def close(self) -> None:
        """Waits for the pass that is running."""
        self._thread.shutdown()

    @torch.inference_mode()
    def _pass(self, frames: Sequence[Wanted]) -> list[Entry]:
        self._step("pass")
        copied = [self._copies.up(pixels) for pixels, _ in frames]
        forms = [form for _, form in frames]
        entries = payloads(self._half, copied, forms, self._attention, self._trunk)
        return [self._copies.down(entry) for entry in entries]
