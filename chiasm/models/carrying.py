"""How weights get to where they are computed with, and where they are kept meanwhile.

On a CUDA device they are kept in pinned memory of the host and copied on a stream of their own, beside what is being
computed. On a CPU they are kept in a file, mapped: they are computed with where they lie, and what would be a copy is
advice to the system to read pages ahead, or to let go of them. Both stand behind `Carrier`, and what decides which
weights come when (`chiasm.models.streaming`) is one code for both. Here nothing is known of layers: weights are bytes.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol, TypeAlias

import torch
from torch import Tensor

from chiasm.allocation import give_back
from chiasm.settings import SettingsError

Arriving: TypeAlias = Callable[[], Tensor]
"""Gives (bytes,) uint8 that whatever is asked of the device next may read. It waits for nothing on the host."""

ALIGNED: Final = 64
"""Bytes to whose multiples weights are laid, as torch lays tensors: how some products are computed depends on it."""


class Carrier(Protocol):
    """Where weights are kept, and how they come from there."""

    def keep(self, sizes: Sequence[int]) -> list[Tensor]:
        """(bytes,) uint8 of each size on the host, for as long as any of them is held. Raises SettingsError if there
        is no room for them."""
        ...

    def room(self, size: int) -> Tensor:
        """(bytes,) uint8 on the device; empty where weights are computed with where they are kept."""
        ...

    def fetch(self, kept: Tensor, room: Tensor) -> Arriving:
        """Begins to bring what is kept into a room. What has been asked of the device before still finds in the room
        what was there."""
        ...

    def leave(self, kept: Tensor) -> None:
        """Nothing reads what is kept until it is fetched again."""
        ...

    def settle(self) -> None:
        """Waits until the device has done all that it was asked."""
        ...

    def freed(self) -> None:
        """Memory of the device was freed, and may be wanted by others."""
        ...


class Mapped:
    """`Carrier` of a CPU: a file without a name, which is gone when nothing of it is held any more.

    Args:
        directory: where it is. Its file system should be a disk: one in memory holds the weights in memory.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self._maps: dict[int, tuple[mmap.mmap, int, int]] = {}  # by address: the file, and which bytes of it

    def keep(self, sizes: Sequence[int]) -> list[Tensor]:
        if not any(sizes):
            return [torch.empty(0, dtype=torch.uint8) for _ in sizes]
        steps = [-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes]
        try:
            with tempfile.TemporaryFile(dir=self._directory, prefix="chiasm-weights-") as file:
                os.posix_fallocate(file.fileno(), 0, sum(steps))  # or a full disk ends the process later
                mapped = mmap.mmap(file.fileno(), sum(steps))
        except OSError as error:
            raise SettingsError(
                f"{sum(steps)} bytes of weights cannot be kept in a file: {error.strerror}",
                "--offload-dir",
                "name a folder on a disk with that much room",
            ) from None
        whole, at, made = torch.frombuffer(mapped, dtype=torch.uint8), 0, []
        for size, step in zip(sizes, steps, strict=True):
            kept = whole[at : at + size]
            self._maps[kept.data_ptr()] = mapped, at, step
            made.append(kept)
            at += step
        return made

    def room(self, size: int) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def fetch(self, kept: Tensor, room: Tensor) -> Arriving:
        self._advise(kept, mmap.MADV_WILLNEED)
        return lambda: kept

    def leave(self, kept: Tensor) -> None:
        self._advise(kept, mmap.MADV_DONTNEED)  # of a shared map: the file has what was written

    def settle(self) -> None:
        """It has done whatever it was asked."""

    def freed(self) -> None:
        give_back()

    def _advise(self, kept: Tensor, advice: int) -> None:
        if kept.nbytes:
            mapped, start, length = self._maps[kept.data_ptr()]
            mapped.madvise(advice, start, length)


class Copied:
    """`Carrier` of a CUDA device, with copies on a stream of their own.

    Args:
        pin_memory: pages of the host are locked, so that the device copies them by itself. Otherwise the host copies
            them piece by piece, and computes nothing meanwhile.
    """

    def __init__(self, device: torch.device, *, pin_memory: bool = True) -> None:
        self._device = device
        self._pinned = pin_memory
        self._stream = torch.cuda.Stream(device)

    def keep(self, sizes: Sequence[int]) -> list[Tensor]:
        if not any(sizes):
            return [torch.empty(0, dtype=torch.uint8) for _ in sizes]
        steps = [-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes]
        memory = _Memory(-1, sum(steps), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole, at, made = torch.frombuffer(memory, dtype=torch.uint8), 0, []
        if self._pinned:
            memory.pin(whole.data_ptr())
        for size, step in zip(sizes, steps, strict=True):
            made.append(whole[at : at + size])
            at += step
        return made

    def room(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def fetch(self, kept: Tensor, room: Tensor) -> Arriving:
        computing = torch.cuda.current_stream(self._device)
        came = room[: kept.nbytes]
        self._stream.wait_stream(computing)
        with torch.cuda.stream(self._stream):
            came.copy_(kept, non_blocking=self._pinned)
            done = torch.cuda.Event()
            done.record(self._stream)

        def arrived() -> Tensor:
            torch.cuda.current_stream(self._device).wait_event(done)
            return came

        return arrived

    def leave(self, kept: Tensor) -> None:
        """It stays where it is."""

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)

    def freed(self) -> None:
        torch.cuda.empty_cache()


def carrier(device: torch.device, *, directory: Path | None = None, pin_memory: bool = True) -> Carrier:
    """The one of a device.

    Args:
        directory: where weights are kept that are computed with on a CPU; None for the system's temporary folder.
        pin_memory: as of `Copied`.
    """
    return Copied(device, pin_memory=pin_memory) if device.type == "cuda" else Mapped(directory)


class _Memory(mmap.mmap):
    """Memory of the host that is locked for as long as anything holds it.

    Not torch's own pinned memory: that comes in powers of two, and weights would take up to twice their size.
    """

    _pinned_at: int | None = None

    def pin(self, address: int) -> None:
        """Locks it. Raises SettingsError if that may not be."""
        try:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, len(self), 0))
        except RuntimeError as error:
            raise SettingsError(
                f"{len(self)} bytes of weights cannot be pinned: {error}",
                "--pin-memory",
                "--no-pin-memory copies them more slowly",
            ) from None
        self._pinned_at = address

    def __del__(self) -> None:  # before the memory is given to somebody else, who would find it locked
        if self._pinned_at is not None:
            torch.cuda.cudart().cudaHostUnregister(self._pinned_at)
