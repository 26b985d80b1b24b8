"""Opening media without trusting them: the parent's side of the worker processes.

A serving process never parses a picture or a video itself. It hands the bytes to a worker (`chiasm.media.worker`), and
whatever happens there, a crash, endless work, memory without end, costs one request and one worker. This module starts
workers, gives them one job at a time, checks every number they answer with before it allocates anything, and ends them
when they break, when they are old, or when the caller leaves in the middle of a long job. It knows no format. What
makes a list of single pictures is `chiasm.media.listed`'s.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from chiasm.errors import InvalidRequest, Overloaded, ServerError, StatusError
from chiasm.media import framing
from chiasm.media.job import Job
from chiasm.media.open import check
from chiasm.media.places import Place, Places
from chiasm.media.process import Answer, Died, Worker, message
from chiasm.media.types import Decoded, Frame, Limits, MediaSource, Picture, Probed

# A worker is replaced after so many jobs, so that what one file left behind in a library does not live for ever.
JOBS_PER_WORKER = 200
# Seconds that a job goes on whose caller has left. About what starting another process takes.
LINGER = 0.5
# Videos that are being decoded, for each process that works: the others wait for their readers. They take memory and no
# processor.
LONG = 4
# Seconds after which a medium may come again that no process could be started for.
RETRY_SECONDS = 1.0
# Processor time is what is limited; the clock only catches a worker that sleeps, on a machine that may be busy.
_WALL_FACTOR = 10.0
_WALL_EXTRA = 30.0
_DEFAULTS = Limits()


class Sandbox:
    """Opens and decodes media in worker processes. Usable from one event loop; starts nothing until it is used.

    Args:
        workers: how many media are parsed at a time; further ones wait their turn, first come first served. A video
            whose reader takes its time lets others go on and keeps its process, so there are `LONG` videos for each at
            most.
        limits: what one medium may claim or contain, and what one job may use.
        jobs_per_worker: after so many jobs a worker is replaced.
    """

    def __init__(self, *, workers: int = 1, limits: Limits = _DEFAULTS, jobs_per_worker: int = JOBS_PER_WORKER) -> None:
        assert workers >= 1
        assert jobs_per_worker >= 1
        self.limits = limits
        self._jobs_per_worker = jobs_per_worker
        self._places = Places(workers, LONG * workers)
        self._idle: list[Worker] = []
        self._living: set[Worker] = set()
        self._ending: set[Worker] = set()
        self._abandoned: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def pids(self) -> frozenset[int]:
        """Process ids of the workers that are running now, busy or idle."""
        return frozenset(worker.pid for worker in self._living)

    async def __aenter__(self) -> Self:
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
        if self._abandoned:
            await asyncio.wait(self._abandoned)
        while self._ending:
            await asyncio.wait([worker.ended for worker in self._ending])

    async def probe(self, source: MediaSource, *, item: str | None = None) -> Probed:
        """What headers and packet index of a medium say. No pixel leaves the worker.

        Raises:
            InvalidRequest: the medium is at fault; `item` names it. Reasons: those of `chiasm.media.open.check`, and
                MEDIA_DECODE_FAILED, MEDIA_UNSUPPORTED, NO_FRAMES, NO_VIDEO_STREAM, POISON_INPUT (the worker died of
                it, twice).
            ServerError: MEDIA_UNCONFINED, a worker could not give up what it must and has read nothing.
            Overloaded: MEDIA_PROCESSES, the machine has no room for a worker now.
        """
        try:
            check(source, self.limits)
            async with aclosing(self._run({"do": "probe"}, source)) as events:
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
        closes the generator (`contextlib.aclosing`): what is left of a short job is thrown away, a longer one is ended.

        indices: strictly increasing frame numbers, not empty, as `probe` counts them; `(0,)` for an image.

        Raises:
            InvalidRequest, ServerError: as `probe`; frames that came before it are not to be used.
        """
        assert indices, "nothing to decode"
        assert indices[0] >= 0, indices
        assert all(a < b for a, b in itertools.pairwise(indices)), indices
        try:
            check(source, self.limits)
            async with aclosing(self._run({"do": "decode"}, source, indices)) as events:
                picture: list[Frame | Decoded] = []
                async for event in events:
                    assert isinstance(event, (Frame, Decoded))
                    if source.kind == "image":
                        picture.append(event)  # its process is done before its reader takes its time
                    else:
                        yield event
            for event in picture:
                yield event
        except StatusError as error:
            raise _at(error, item) from error.__cause__

    async def picture(
        self,
        data: bytes,
        *,
        index: int,
        first: tuple[int, int] | None,
        spent: float = 0.0,
        item: str | None = None,
    ) -> Picture:
        """Frame `index` of a list, opened and decoded by itself. A worker is held for no longer than that.

        Args:
            first: height and width of the list's first frame, which all others have; None for the first.
            spent: seconds of processor time that the frames before it took: a list has as much as a file.

        Raises:
            InvalidRequest, ServerError: as `probe`, and FRAME_LAYOUT for another size than `first`.
        """
        source = MediaSource("image", data)
        left = self.limits.cpu_seconds - spent
        try:
            check(source, self.limits)
            if left <= 0:
                raise self._time_limit()
            job = {"do": "picture", "index": index, "first": first}
            limits = replace(self.limits, cpu_seconds=left)
            async with aclosing(self._run(job, source, limits=limits, counts=index == 0)) as events:
                async for event in events:
                    assert isinstance(event, Picture)
                    return event
            raise AssertionError("a job ended without an answer")
        except StatusError as error:
            raise _at(error, item) from error.__cause__

    async def _run(
        self,
        do: Mapping[str, Any],
        source: MediaSource,
        indices: Sequence[int] = (),
        *,
        limits: Limits | None = None,
        counts: bool = True,
    ) -> AsyncGenerator[Answer, None]:
        """One job, on a second worker if the first one dies of it. Frames already given are not given again.

        counts: whether it makes its worker older; the pictures of a list do so once.
        """
        given = 0
        long = do["do"] == "decode" and source.kind == "video"
        place = Place(self._places, long=long)
        await place.take()
        kept = True  # the place: whoever leaves in the middle leaves it to the job
        try:
            for attempt in (1, 2):
                seen = 0
                worker = self._worker()
                job = Job(self._job(worker, do, source, indices, limits or self.limits))
                try:
                    async for event in job:
                        if not isinstance(event, Frame):
                            break
                        seen += 1
                        if seen > given:
                            given = seen
                            if long:
                                place.stand_by()
                            yield event
                            await place.go_on()
                except InvalidRequest as error:
                    if error.facts.get("cause") == "memory_limit":
                        self._end(worker)  # what it could not get once it may have kept in pieces
                    else:
                        self._give_back(worker, counts)
                    raise
                except (Died, TimeoutError) as error:
                    self._end(worker)
                    status = -signal.SIGPROF if isinstance(error, TimeoutError) else await self._status(worker)
                    if status in (-signal.SIGPROF, -signal.SIGXCPU):
                        raise self._time_limit() from error
                    if status == framing.UNCONFINED:
                        raise ServerError(
                            "MEDIA_UNCONFINED", "the process that opens media could not be confined"
                        ) from error
                    self._demand_open()
                    if attempt == 2:
                        raise InvalidRequest(
                            "POISON_INPUT",
                            "opening the medium ended the process that tried, twice",
                            facts={"attempts": attempt},
                        ) from error
                except BaseException:
                    kept = False
                    place.keep()
                    leaving = asyncio.create_task(self._abandon(worker, job, place))
                    self._abandoned.add(leaving)
                    leaving.add_done_callback(self._abandoned.discard)
                    raise
                else:
                    self._give_back(worker, counts)
                    yield event
                    return
        finally:
            if kept:
                place.end()

    async def _abandon(self, worker: Worker, job: Job[Answer], place: Place) -> None:
        """The caller has left in the middle of a job. A short one comes to its end, and its process lives on: starting
        another costs more. A longer one is ended with its process."""
        try:
            if await job.leave(LINGER):
                self._give_back(worker)
            else:
                self._end(worker)
        finally:
            place.end()

    def _demand_open(self) -> None:
        if self._closed:
            raise RuntimeError("the sandbox is closed")

    def _worker(self) -> Worker:
        self._demand_open()
        while self._idle:
            worker = self._idle.pop()
            if not worker.ended.done():
                return worker
            self._end(worker)
        try:
            worker = Worker(self.limits)
        except OSError as error:
            raise Overloaded(
                "MEDIA_PROCESSES", "no process could be started that opens media", retry_after=RETRY_SECONDS
            ) from error
        self._living.add(worker)
        return worker

    def _give_back(self, worker: Worker, counts: bool = True) -> None:
        worker.jobs += counts
        if worker.jobs >= self._jobs_per_worker or self._closed:
            self._end(worker)
        else:
            self._idle.append(worker)

    def _end(self, worker: Worker) -> None:
        """Kills at once and reaps in the background, so that this works while a task is being cancelled."""
        self._living.discard(worker)
        if not worker.ended.done():
            worker.kill()
            self._ending.add(worker)
            worker.ended.add_done_callback(lambda _: self._ending.discard(worker))

    async def _status(self, worker: Worker) -> int:
        # Shielded: cancelling the one who asks must not cancel what says that the process is gone.
        return await asyncio.shield(worker.ended)

    def _time_limit(self) -> InvalidRequest:
        seconds = self.limits.cpu_seconds
        return InvalidRequest(
            "MEDIA_DECODE_FAILED",
            f"decoding took more than the {seconds:g} s of processor time one medium may use",
            facts={"cause": "time_limit", "limit": seconds},
        )

    async def _job(
        self, worker: Worker, do: Mapping[str, Any], source: MediaSource, indices: Sequence[int], limits: Limits
    ) -> AsyncGenerator[Answer, None]:
        """What the worker answers; the last event is the only one that is not a Frame."""
        # The time counts only while the worker is waited for, not while the reader takes its time with a frame.
        left = limits.cpu_seconds * _WALL_FACTOR + _WALL_EXTRA
        clock = asyncio.get_running_loop().time
        wanted = frozenset(indices)
        started = clock()
        async with asyncio.timeout(left):
            await worker.send(*message(do, source, indices, limits))
        left -= clock() - started
        last, count = -1, 0
        while True:
            started = clock()
            async with asyncio.timeout(left):
                event = await worker.answer(limits)
            left -= clock() - started
            match event:
                case Frame():
                    fits = event.index in wanted and event.index > last
                    last, count = event.index, count + 1
                case Decoded():
                    fits = do["do"] == "decode" and event.frames == count
                case Probed():
                    fits = do["do"] == "probe"
                case Picture():
                    fits = do["do"] == "picture" and do["first"] in (None, event.rgb.shape[:2])
            if not fits:
                raise Died
            yield event
            if not isinstance(event, Frame):
                return


def _at(error: StatusError, item: str | None) -> StatusError:
    return error if item is None else error.at(item)
