"""Recording what a device is asked to do, and asking for all of it again: what of a CUDA runtime graphs need.

The runtime stands behind `Device`, so that what decides what is recorded and replayed runs on any machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Device(Protocol):
    """What of a CUDA runtime graphs need."""

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Runs a function once, then records what it launches. Returns what launches all of that again, on the same
        memory."""
        ...

    def mark(self) -> None:
        """Notes the copies to the device that have been begun."""
        ...

    def wait(self) -> None:
        """Waits until the copies that were noted last are done, and nothing that was begun after them."""
        ...


class CudaDevice:
    """`Device` on a CUDA device. Its graphs share their memory: they run one after another."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._memory = torch.cuda.graph_pool_handle()
        self._copied = torch.cuda.Event()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        current = torch.cuda.current_stream(self._device)
        # A capture that fails leaves its stream the current one; leaving this block does not.
        with torch.cuda.device(self._device), torch.cuda.stream(current):
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                run()  # builds kernels and takes workspaces, neither of which can be captured
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # Only this thread's calls are held to what may be captured: others go on meanwhile.
            with torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"):
                run()
        return graph.replay

    def mark(self) -> None:
        self._copied.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        self._copied.synchronize()
