"""Opening media without trusting them: the parent's side of the worker processes.

A serving process never parses a picture or a video itself. It hands the bytes to a worker (`chiasm.media.worker`), and
whatever happens there, a crash, endless work, memory without end, costs one request and one worker. This module starts
workers, gives them one job at a time, checks every number they answer with before it allocates anything, and ends them
when they break, when they are old, or when the caller leaves. It knows no format; raw frames, in which there is nothing
to parse, never reach a worker.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
import os
import signal
import socket
import sys
from array import array
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

import chiasm
from chiasm.errors import InvalidRequest, StatusError
from chiasm.media import framing, raw
from chiasm.media.open import check
from chiasm.media.types import Decoded, Frame, Limits, MediaSource, Probed, RawFrame

# A worker is replaced after so many jobs, so that what one file left behind in a library does not live for ever.
JOBS_PER_WORKER = 200
# Processor time is what is limited; the clock only catches a worker that sleeps, on a machine that may be busy.
_WALL_FACTOR = 10.0
_WALL_EXTRA = 30.0
_MAX_FLAGS = 64
_DEFAULTS = Limits()
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


class _Died(Exception):
    """The worker is gone or does not keep to the protocol."""


class _Worker:
    """One process and the socket to it. Serves one job at a time."""

    def __init__(self, process: asyncio.subprocess.Process, connection: socket.socket) -> None:
        self.process = process
        self.connection = connection
        self.jobs = 0

    @classmethod
    async def start(cls, limits: Limits) -> _Worker:
        ours, theirs = socket.socketpair()
        try:
            ours.setblocking(False)
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-P", "-s", "-m", "chiasm.media.worker"),
                *(str(theirs.fileno()), str(limits.memory_bytes), str(limits.open_files)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,  # the libraries' own words, which may hold addresses
                pass_fds=[theirs.fileno()],
                env=_environment(),
                start_new_session=True,  # a Ctrl-C at a terminal is for the server, which then ends its workers
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return cls(process, ours)

    async def send(self, header: dict[str, Any], parts: Sequence[bytes | memoryview]) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_sendall(self.connection, framing.pack(header, [len(part) for part in parts]))
            for part in parts:
                await loop.sock_sendall(self.connection, part)
        except OSError as error:
            raise _Died from error

    async def receive(self, view: memoryview) -> None:
        """Fills `view` or raises _Died."""
        loop = asyncio.get_running_loop()
        turn = 0
        while view:
            try:
                count = await loop.sock_recv_into(self.connection, view)
            except OSError as error:
                raise _Died from error
            if count == 0:
                raise _Died
            view = view[count:]
            turn += count
            if turn >= _BYTES_PER_TURN:
                turn = 0
                await asyncio.sleep(0)

    async def header(self) -> tuple[dict[str, Any], list[int]]:
        prefix = bytearray(framing.PREFIX.size)
        await self.receive(memoryview(prefix))
        try:
            body = bytearray(framing.header_size(prefix))
            await self.receive(memoryview(body))
            return framing.unpack(body)
        except framing.BrokenFrame as error:
            raise _Died from error

    def kill(self) -> None:
        self.connection.close()
        if self.process.returncode is None:
            try:
                self.process.kill()
            except ProcessLookupError:
                return


class Sandbox:
    """Opens and decodes media in worker processes. Usable from one event loop; starts nothing until it is used.

    Args:
        workers: how many media are parsed at a time; further ones wait their turn, first come first served.
        limits: what one medium may claim or contain, and what one job may use.
        jobs_per_worker: after so many jobs a worker is replaced.
    """

    def __init__(self, *, workers: int = 1, limits: Limits = _DEFAULTS, jobs_per_worker: int = JOBS_PER_WORKER) -> None:
        assert workers >= 1
        assert jobs_per_worker >= 1
        self._limits = limits
        self._jobs_per_worker = jobs_per_worker
        self._turns = asyncio.Semaphore(workers)
        self._idle: list[_Worker] = []
        self._living: set[_Worker] = set()
        self._reaping: set[asyncio.Task[int]] = set()
        self._closed = False

    @property
    def pids(self) -> frozenset[int]:
        """Process ids of the workers that are running now, busy or idle."""
        return frozenset(worker.process.pid for worker in self._living)

    async def __aenter__(self) -> Sandbox:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends every worker, also one in the middle of a job, and waits until they are gone. May be called twice."""
        self._closed = True
        for worker in tuple(self._living):
            self._end(worker)
        while self._reaping:
            await asyncio.wait(tuple(self._reaping))

    async def probe(self, source: MediaSource, *, item: str | None = None) -> Probed:
        """What headers and packet index of a medium say. No pixel leaves the worker.

        Raises:
            InvalidRequest: the medium is at fault; `item` names it. Reasons: those of `chiasm.media.open.check`, and
                MEDIA_DECODE_FAILED, MEDIA_UNSUPPORTED, NO_FRAMES, NO_VIDEO_STREAM, POISON_INPUT (the worker died of
                it, twice).
        """
        try:
            check(source, self._limits)
            if (frames := _raw_only(source)) is not None:
                return _probe_raw(source, frames)
            async with aclosing(self._run("probe", source, ())) as events:
                async for event in events:
                    assert isinstance(event, Probed)
                    return event
            raise AssertionError("a job ended without an answer")
        except StatusError as error:
            raise _at(error, item) from error.__cause__

    async def decode(
        self, source: MediaSource, indices: Sequence[int], *, item: str | None = None
    ) -> AsyncGenerator[Frame | Decoded, None]:
        """The frames at `indices`, one by one in presentation order, then exactly one `Decoded`.

        A worker decodes no further ahead than the socket holds, so a slow reader slows it down. Whoever stops reading
        closes the generator (`contextlib.aclosing`): that ends the job at once.

        indices: strictly increasing frame numbers, not empty, as `probe` counts them; `(0,)` for an image.

        Raises:
            InvalidRequest: as `probe`; frames that came before it are not to be used.
        """
        assert indices, "nothing to decode"
        assert indices[0] >= 0, indices
        assert all(a < b for a, b in itertools.pairwise(indices)), indices
        try:
            check(source, self._limits)
            if (frames := _raw_only(source)) is not None:
                offsets = _probe_raw(source, frames).frame_offsets
                for index in indices:
                    rgb = await asyncio.to_thread(raw.to_rgb, frames[index])
                    yield Frame(index, offsets[index], rgb)
                yield Decoded(len(indices), False)
                return
            async with aclosing(self._run("decode", source, indices)) as events:
                async for event in events:
                    assert not isinstance(event, Probed)
                    yield event
        except StatusError as error:
            raise _at(error, item) from error.__cause__

    async def _run(
        self, do: str, source: MediaSource, indices: Sequence[int]
    ) -> AsyncGenerator[Probed | Frame | Decoded, None]:
        """One job, on a second worker if the first one dies of it. Frames already given are not given again."""
        given = 0
        async with self._turns:
            for attempt in (1, 2):
                seen = 0
                worker = await self._worker()
                try:
                    async with aclosing(self._job(worker, do, source, indices)) as events:
                        async for event in events:
                            if not isinstance(event, Frame):
                                break
                            seen += 1
                            if seen > given:
                                given = seen
                                yield event
                except InvalidRequest:
                    self._give_back(worker)
                    raise
                except (_Died, TimeoutError) as error:
                    self._end(worker)
                    if isinstance(error, TimeoutError) or await self._ran_out_of_time(worker):
                        raise self._time_limit() from error
                    self._demand_open()
                    if attempt == 2:
                        raise InvalidRequest(
                            "POISON_INPUT",
                            "Opening the medium ended the process that tried, twice.",
                            facts={"attempts": attempt},
                        ) from error
                except BaseException:
                    # The caller has left in the middle of a job; waiting for its end would cost what nobody reads.
                    self._end(worker)
                    raise
                else:
                    self._give_back(worker)
                    yield event
                    return

    def _demand_open(self) -> None:
        if self._closed:
            raise RuntimeError("the sandbox is closed")

    async def _worker(self) -> _Worker:
        self._demand_open()
        while self._idle:
            worker = self._idle.pop()
            if worker.process.returncode is None:
                return worker
            self._end(worker)
        worker = await _Worker.start(self._limits)
        self._living.add(worker)
        if self._closed:  # while the process was starting
            self._end(worker)
        self._demand_open()
        return worker

    def _give_back(self, worker: _Worker) -> None:
        worker.jobs += 1
        if worker.jobs >= self._jobs_per_worker or self._closed:
            self._end(worker)
        else:
            self._idle.append(worker)

    def _end(self, worker: _Worker) -> None:
        """Kills at once and reaps in the background, so that this works while a task is being cancelled."""
        worker.kill()
        if worker in self._living:
            self._living.discard(worker)
            task = asyncio.ensure_future(worker.process.wait())
            self._reaping.add(task)
            task.add_done_callback(self._reaping.discard)

    async def _ran_out_of_time(self, worker: _Worker) -> bool:
        return await worker.process.wait() in (-signal.SIGPROF, -signal.SIGXCPU)

    def _time_limit(self) -> InvalidRequest:
        seconds = self._limits.cpu_seconds
        return InvalidRequest(
            "MEDIA_DECODE_FAILED",
            f"Decoding took more than the {seconds:g} s of processor time one medium may use.",
            facts={"cause": "time_limit", "limit": seconds},
        )

    async def _job(
        self, worker: _Worker, do: str, source: MediaSource, indices: Sequence[int]
    ) -> AsyncGenerator[Probed | Frame | Decoded, None]:
        """What the worker answers; the last event is the only one that is not a Frame."""
        # The time counts only while the worker is waited for, not while the reader takes its time with a frame.
        left = self._limits.cpu_seconds * _WALL_FACTOR + _WALL_EXTRA
        clock = asyncio.get_running_loop().time
        started = clock()
        async with asyncio.timeout(left):
            await worker.send(*_message(do, source, indices, self._limits))
        left -= clock() - started
        last = -1
        while True:
            started = clock()
            async with asyncio.timeout(left):
                header, parts = await worker.header()
                try:
                    event = await self._event(worker, header, parts)
                except (KeyError, TypeError, ValueError, OverflowError) as error:
                    raise _Died from error
            left -= clock() - started
            if isinstance(event, Frame):
                if not (event.index in indices and event.index > last):
                    raise _Died
                last = event.index
            yield event
            if not isinstance(event, Frame):
                return

    async def _event(self, worker: _Worker, header: dict[str, Any], parts: list[int]) -> Probed | Frame | Decoded:
        """One answer of a worker. It may be lying: every number is checked before memory follows from it."""
        what = header["is"]
        if what == "error":
            raise _refusal(header)
        if what == "frame":
            height, width = _natural(header["height"]), _natural(header["width"])
            offset = _seconds(header["offset"])
            _demand(0 < height * width <= self._limits.max_pixels and parts == [height * width * 3])
            rgb = np.empty((height, width, 3), np.uint8)
            await worker.receive(rgb.data.cast("B"))
            return Frame(_natural(header["index"]), offset, rgb)
        flags = tuple(str(flag)[:64] for flag in header["flags"][:_MAX_FLAGS])
        if what == "decoded":
            return Decoded(_natural(header["frames"]), bool(header["truncated"]), flags)
        _demand(what == "probed" and header["kind"] in ("image", "video"))
        height, width = _natural(header["height"]), _natural(header["width"])
        _demand(0 < height * width <= self._limits.max_pixels)
        _demand(len(parts) == 1 and parts[0] % 8 == 0 and 8 <= parts[0] <= 8 * self._limits.max_video_frames)
        packed = bytearray(parts[0])
        await worker.receive(memoryview(packed))
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


def _environment() -> dict[str, str]:
    """What Python needs to find this library, and one thread for every library that would start more."""
    path = [str(Path(chiasm.__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONDONTWRITEBYTECODE": "1",
        "LC_ALL": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


def _message(
    do: str, source: MediaSource, indices: Sequence[int], limits: Limits
) -> tuple[dict[str, Any], list[bytes]]:
    bounds = dataclasses.asdict(limits)
    header = {
        "do": do,
        "kind": source.kind,
        "offsets": None if source.offsets is None else [float(offset) for offset in source.offsets],
        "layouts": None,
        "limits": {**bounds, "formats": sorted(limits.formats)},
    }
    packed = array("q", indices).tobytes()
    if source.data is not None:
        return header, [source.data, packed]
    assert source.frames is not None
    frames = source.frames
    raws = [frame if isinstance(frame, RawFrame) else None for frame in frames]
    layouts = [None if frame is None else [frame.height, frame.width, frame.channels] for frame in raws]
    files = [frame.data if isinstance(frame, RawFrame) else frame for frame in frames]
    return {**header, "layouts": layouts}, [*files, packed]


def _raw_only(source: MediaSource) -> list[RawFrame] | None:
    frames = source.frames or ()
    raws = [frame for frame in frames if isinstance(frame, RawFrame)]
    return raws if raws and len(raws) == len(frames) else None


def _probe_raw(source: MediaSource, frames: Sequence[RawFrame]) -> Probed:
    listed = source.kind == "video" and source.offsets is not None
    offsets = tuple(float(offset) for offset in source.offsets or ()) if listed else (0.0,)
    tail = offsets[-1] - offsets[-2] if len(offsets) > 1 else 0.0
    duration = offsets[-1] - offsets[0] + tail
    first = frames[0]
    return Probed(source.kind, first.height, first.width, offsets, duration, "raw", listed, len(frames))


def _at(error: StatusError, item: str | None) -> StatusError:
    return error if item is None else error.at(item)


def _demand(kept: bool) -> None:
    if not kept:
        raise _Died


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
