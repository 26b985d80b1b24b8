"""One worker process and the socket to it, seen from the parent. Serves one job at a time.

The parent trusts nothing that comes back: a worker may have been taken over by the file it reads. Sizes are checked
before memory is set aside for them, words are cut, and what is not an answer of this protocol counts as a dead worker.
Who gets which worker and what a death means is decided in `chiasm.media.sandbox`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import signal
import socket
import subprocess
import sys
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

import chiasm
from chiasm.errors import InvalidRequest
from chiasm.media import framing
from chiasm.media.types import Decoded, Frame, Limits, MediaSource, Picture, Probed, Rgb

_MAX_FLAGS = 64
# Large messages arrive whenever they can; in between, others get the loop.
_BYTES_PER_TURN = 4 * 2**20

# What a worker may say. Anything else means that it is no longer the program that was started.
_REASONS = frozenset(
    {
        "MEDIA_DECODE_FAILED",
        "MEDIA_UNSUPPORTED",
        "MEDIA_TOO_LARGE",
        "NO_FRAMES",
        "NO_VIDEO_STREAM",
        "FRAME_LAYOUT",
    }
)


Answer: TypeAlias = Probed | Frame | Picture | Decoded


class Died(Exception):
    """The worker is gone or does not keep to the protocol."""


class Worker:
    """A running process. `jobs` counts what it has done, `ended` is done with the exit status once it is reaped.

    The process is watched and signalled through a descriptor of its own, so that neither a reused process id nor
    another watcher of children can come between. To be made inside a running event loop, in which it then lives.

    Raises OSError if the machine has no process or no descriptor left for it; nothing is left behind then.
    """

    def __init__(self, limits: Limits) -> None:
        self.connection, theirs = socket.socketpair()
        try:
            self.connection.setblocking(False)
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-s", "-m", "chiasm.media.worker"),
                    *(str(theirs.fileno()), str(limits.memory_bytes), str(limits.open_files)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # the libraries' own words, which may hold addresses
                pass_fds=[theirs.fileno()],
                env=_environment(),
                start_new_session=True,  # a Ctrl-C at a terminal is for the server, which then ends its workers
            )
        except BaseException:
            self.connection.close()
            raise
        finally:
            theirs.close()
        try:
            self._handle = os.pidfd_open(self._process.pid)
        except BaseException:
            self._process.kill()
            self._process.wait()
            self.connection.close()
            raise
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._handle, self._reap)
        self.ended: asyncio.Future[int] = self._loop.create_future()
        self.jobs = 0

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """Ends the process now; `ended` says when it is gone. Whoever waits for an answer is woken by its absence."""
        if not self.ended.done():
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def _reap(self) -> None:
        self._loop.remove_reader(self._handle)
        os.close(self._handle)
        # A waiting reader has been woken by the end of the stream, which comes before the end of the process.
        self.connection.close()
        self.ended.set_result(self._process.wait())

    async def send(self, header: dict[str, Any], parts: Sequence[bytes | memoryview]) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(self.connection, framing.pack(header, [len(part) for part in parts]))
            for part in parts:
                await loop.sock_sendall(self.connection, part)
        except OSError as error:
            raise Died from error

    async def _receive(self, view: memoryview) -> None:
        """Fills `view` or raises Died."""
        loop = asyncio.get_running_loop()
        turn = 0
        while view:
            try:
                count = await loop.sock_recv_into(self.connection, view)
            except OSError as error:
                raise Died from error
            if count == 0:
                raise Died
            view = view[count:]
            turn += count
            if turn >= _BYTES_PER_TURN:
                turn = 0
                await asyncio.sleep(0)

    async def _header(self) -> tuple[dict[str, Any], list[int]]:
        prefix = bytearray(framing.PREFIX.size)
        await self._receive(memoryview(prefix))
        try:
            body = bytearray(framing.header_size(prefix))
            await self._receive(memoryview(body))
            return framing.unpack(body)
        except framing.BrokenFrame as error:
            raise Died from error

    async def answer(self, limits: Limits) -> Answer:
        """One answer of a worker. It may be lying: every number is checked before memory follows from it."""
        header, parts = await self._header()
        try:
            return await self._understand(header, parts, limits)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise Died from error

    async def _understand(self, header: dict[str, Any], parts: list[int], limits: Limits) -> Answer:
        what = header["is"]
        if what == "error":
            raise _refusal(header)
        if what == "frame":
            index, offset = _natural(header["index"]), _seconds(header["offset"])
            return Frame(index, offset, await self._pixels(header, parts, limits))
        flags = tuple(str(flag)[:64] for flag in header["flags"][:_MAX_FLAGS])
        if what == "picture":
            found, seconds = str(header["found"])[:64], _seconds(header["seconds"])
            return Picture(await self._pixels(header, parts, limits), found, flags, seconds)
        if what == "decoded":
            return Decoded(_natural(header["frames"]), bool(header["truncated"]), flags)
        _demand(what == "probed" and header["kind"] in ("image", "video"))
        height, width = _natural(header["height"]), _natural(header["width"])
        _demand(0 < height * width <= limits.max_pixels)
        _demand(len(parts) == 1 and parts[0] % 8 == 0 and 8 <= parts[0] <= 8 * limits.max_video_frames)
        packed = bytearray(parts[0])
        await self._receive(memoryview(packed))
        offsets = tuple(_seconds(offset) for offset in array("d", bytes(packed)))
        return Probed(
            header["kind"],
            height,
            width,
            offsets,
            _seconds(header["duration"]),
            str(header["found"])[:64],
            bool(header["animated"]),
            _natural(header["frames_in_file"]),
            flags,
        )

    async def _pixels(self, header: dict[str, Any], parts: list[int], limits: Limits) -> Rgb:
        height, width = _natural(header["height"]), _natural(header["width"])
        _demand(0 < height * width <= limits.max_pixels and parts == [height * width * 3])
        rgb = np.empty((height, width, 3), np.uint8)
        await self._receive(rgb.data.cast("B"))
        return rgb


def _environment() -> dict[str, str]:
    """Where this process looks for modules, and one thread for every library that would start more.

    Nothing else of the parent's environment reaches a worker.
    """
    home = str(Path(chiasm.__file__).parent.parent)  # an editable installation is found without being in the list
    path = dict.fromkeys([*(os.path.abspath(entry) for entry in sys.path if entry), home])
    return {
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONDONTWRITEBYTECODE": "1",
        "LC_ALL": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


def message(
    do: Mapping[str, Any], source: MediaSource, indices: Sequence[int], limits: Limits
) -> tuple[dict[str, Any], list[bytes]]:
    """A job's header and parts.

    do: what is to be done: `{"do": "probe"}`, `{"do": "decode"}` or `{"do": "picture", "index": 3, "first": (64, 48)}`.
    """
    bounds = dataclasses.asdict(limits)
    header = {**do, "kind": source.kind, "limits": {**bounds, "formats": sorted(limits.formats)}}
    return header, [source.data, array("q", indices).tobytes()]


def _demand(kept: bool) -> None:
    if not kept:
        raise Died


def _natural(value: Any) -> int:
    _demand(type(value) is int and 0 <= value < 2**53)
    return int(value)


def _seconds(value: Any) -> float:
    _demand(isinstance(value, (int, float)) and math.isfinite(value) and value >= 0)
    return float(value)


def _refusal(header: dict[str, Any]) -> InvalidRequest:
    reason, message, facts = header["reason"], header["message"], header["facts"]
    _demand(reason in _REASONS and isinstance(message, str) and isinstance(facts, dict))
    _demand(len(facts) <= 16 and all(type(fact) in (str, int, float, bool) for fact in facts.values()))
    kept = {str(name)[:64]: fact[:64] if isinstance(fact, str) else fact for name, fact in facts.items()}
    return InvalidRequest(reason, message[:300], facts=kept)
