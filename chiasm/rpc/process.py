"""Runs a role to its end: settings, log, start, ready, drain, stopped. Every service's `__main__` is one call of `run`.

A role is an asynchronous context manager. It is entered to prepare, serves while it is entered, and is left when every
call has ended:

    @asynccontextmanager
    async def serve(settings: RouterSettings, process: Process) -> AsyncIterator[None]:
        process.server.add("chiasm.rpc.v1.Router", router_pb2_grpc.add_RouterServicer_to_server, servicer)
        process.registry.register(RouterMetrics(servicer))
        async with fleet:
            yield

    def main() -> None:
        run("router", RouterSettings, serve, message_bytes=limits.CLIENT_MESSAGE_BYTES)

It logs, in this order: `starting` {role, version, pid}, `loading` {model, done, total} as often as the role says so,
`listening` {target, http}, `ready` {target, http, seconds} when nothing is `missing` for the first time (after that
`not ready` {missing} and `ready again`; `no progress` {work, seconds} when a thread hangs, `progress` when it goes
on), `draining` {seconds}, `stopped`.

The address is taken before the role is entered, so that one which is in use is told at once. The plain port answers
from the beginning. A signal (SIGTERM, SIGINT) or, when supervised, the end of standard input makes the process drain:
it is not ready, takes no new call, gives the running ones `drain_seconds`, and ends with 0. A second signal cuts that
short. A process that hangs meanwhile ends itself with 1.

What cannot work (settings, an address, a checkpoint) is told in three lines and ends with 2; a fault that nobody
foresaw is logged with its traceback and ends with 1. It knows nothing of models, media and requests.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from functools import partial
from importlib import metadata
from typing import Final, NoReturn, TypeAlias, TypeVar

import uvloop
from prometheus_client import CollectorRegistry, Gauge

from chiasm import log
from chiasm.errors import Cancelled, CheckpointError, ChiasmError, StatusError
from chiasm.failpoints import Failpoints, parse
from chiasm.pulse import Pulse, Standing
from chiasm.rpc import faulty, limits
from chiasm.rpc.http import STALLED, PlainPort
from chiasm.rpc.server import Server
from chiasm.settings import RoleSettings, SettingsError, load

S = TypeVar("S", bound=RoleSettings)

Role: TypeAlias = Callable[[S, "Process"], AbstractAsyncContextManager[None]]

FAILED: Final = 1
REFUSED: Final = 2

OVERTIME: Final = 10.0
"""Seconds beyond `drain_seconds` after which a process that should have ended is ended."""

_FIXES = {
    "ARENA_MISSING": "give --arena-bytes to make one, or the path of one that is there",
    "ARENA_REFUSED": "end the processes that use it and remove it, or choose another --arena",
    "ARENA_NO_SPACE": "give a smaller --arena-bytes, or more shared memory",
}

LOOK: Final = 0.5
"""Seconds between two looks at what a process needs and at whether its threads get on."""

_LOADING_INTERVAL = 0.5
_STARTING = "start"
_PROGRESS = "progress"
_log = logging.getLogger(__name__)


class Process:
    """What a role has to do with its process. Its methods belong to the event loop, `loading` to any thread.

    Attributes:
        role: the role's name.
        server: not started; the role adds its services while it is entered.
        registry: of what the process measures; the role registers its collectors. They run on the event loop.
        failpoints: those that it was started with; none in service.
        listening: whether calls are answered, or were.
        refused: why it has ended itself before it was ready.
    """

    def __init__(
        self,
        role: str,
        settings: RoleSettings,
        *,
        message_bytes: int = limits.WORKER_MESSAGE_BYTES,
        stalled: float = STALLED,
        overtime: float = OVERTIME,
    ) -> None:
        self.role = role
        self.failpoints = Failpoints(parse(settings.failpoints))
        interceptors = [faulty.Interceptor(self.failpoints)] if self.failpoints else []
        self.server = Server(settings.listen, message_bytes=message_bytes, interceptors=interceptors)
        self.registry = CollectorRegistry()
        self._progress = Gauge(
            "chiasm_seconds_without_progress", "Since a thread that has work has finished any.", ["thread"],
            registry=self.registry,
        )  # fmt: skip
        self._settings = settings
        self._stalled = stalled
        self._overtime = overtime
        self._began = time.monotonic()
        self._pulses: list[tuple[Pulse, float]] = []
        self._needs: dict[str, Callable[[], bool]] = {}
        self._told_hanging: frozenset[str] = frozenset()
        self._missing = frozenset({_STARTING})  # replaced, never changed: the plain port reads it in its threads
        self._http = "none"
        self.listening = False
        self.refused: ChiasmError | OSError | None = None
        self._ready = False
        self._was_ready = False
        self._task: asyncio.Task[object] | None = None
        self._ending = asyncio.Event()
        self._stops = 0
        self._told_loading = float("-inf")
        self._loaded = False

    @property
    def missing(self) -> Sequence[str]:
        """What the process needs before it is ready, in words. Empty when it is."""
        return sorted(self._missing)

    @property
    def draining(self) -> bool:
        """Whether it takes nothing new and finishes what it has."""
        return self._ending.is_set()

    async def almost_drained(self, seconds: float) -> None:
        """Returns when the process is to end and running calls have so many seconds left, or half of their time if that
        is less."""
        await self._ending.wait()
        drain = self._settings.drain_seconds
        await asyncio.sleep(drain - min(seconds, drain / 2))

    async def require(self, what: str, *, there: bool) -> None:
        """Says whether something that calls need is there, for example `an encoder`. A process that lacks anything is
        alive and not ready."""
        self._missing = self._missing - {what} if there else self._missing | {what}
        await self._tell()

    @property
    def hanging(self) -> Sequence[str]:
        """Threads that have work and finish none of it."""
        return [pulse.name for pulse, seconds in self._pulses if pulse.seconds > seconds]

    @property
    def standing(self) -> Standing:
        """As those are told who ask it for more than its health. Who is answered is not waiting for its start."""
        return Standing(sorted(self._missing - {_STARTING}), bool(self.hanging))

    def watch(self, pulses: Sequence[Pulse], *, seconds: float) -> None:
        """Has the process count as dead when one of its threads hangs.

        Args:
            seconds: that one piece of work may take.
        """
        self._pulses += [(pulse, seconds) for pulse in pulses]
        for pulse in pulses:
            self._progress.labels(pulse.name).set_function(partial(_seconds, pulse))

    def needs(self, what: str, there: Callable[[], bool]) -> None:
        """Has the process be ready only while something is there; asked twice a second, on the event loop."""
        self._needs[what] = there

    def loading(self, model: str, done: int, total: int) -> None:
        """Logs how many bytes of a model's weights are loaded; twice a second, and the last.

        Raises Cancelled when the process is to end: whoever loads, in whatever thread, then stops.
        """
        if self._ending.is_set():
            raise Cancelled("the process is ending")
        now = time.monotonic()
        last = done >= total and not self._loaded
        if last or (done < total and now - self._told_loading >= _LOADING_INTERVAL):
            self._told_loading, self._loaded = now, last
            _log.info("loading", extra={"model": model, "done": done, "total": total})

    def stop(self) -> None:
        """Begins to end; called again, ends at once."""
        self._stops += 1
        if not self._ending.is_set():
            self._ending.set()
            _end_after(self._overtime + (self._settings.drain_seconds if self.listening else 0))
            if not self.listening and self._task is not None:
                self._task.cancel()  # nothing is served yet, so nothing is waited for
        elif self._stops == 2 and self.listening:
            self._cut_short = asyncio.create_task(self.server.stop())

    def refuse(self, error: ChiasmError | OSError) -> None:
        """Ends a process that has never been ready, and now knows that it will not be, as if it had been so when it
        started: with three lines and 2. One that was ready goes on."""
        if not self._was_ready and self.refused is None:
            self.refused = error
            self.stop()
            self.stop()  # whoever waits here waits in vain

    async def live(self, role: Role[S], settings: S) -> None:
        """From `starting` to `stopped`. Raises what the role raises while it is entered."""
        self._task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        if settings.supervised:
            _at_end_of_input(lambda: loop.call_soon_threadsafe(self.stop), settings.drain_seconds + self._overtime)
        _log.info("starting", extra={"role": self.role, "version": metadata.version("chiasm"), "pid": os.getpid()})
        if settings.insecure:
            _log.warning("insecure", extra={"listen": settings.listen})
        if self.failpoints:
            _log.warning("failpoints", extra={"faults": settings.failpoints})
        try:
            async with AsyncExitStack() as stack:
                if settings.http != "none":
                    port = PlainPort(
                        settings.http,
                        registry=self.registry,
                        missing=lambda: self.missing,
                        hanging=lambda: self.hanging,
                        stalled=self._stalled,
                    )
                    self._http = (await stack.enter_async_context(port)).address
                self.server.bind()
                stack.push_async_callback(self.server.stop)
                await stack.enter_async_context(role(settings, self))
                await self._serve(settings)
        except (asyncio.CancelledError, Cancelled):
            if not self._ending.is_set():
                raise
        _log.info("stopped")

    async def _serve(self, settings: RoleSettings) -> None:
        self.listening = True  # before it is true: a server that is interrupted while it starts cannot be stopped
        await self.server.start()
        self._missing -= {_STARTING}
        _log.info("listening", extra={"target": self.server.target, "http": self._http})
        await self._tell()
        looking = asyncio.create_task(self._keep_looking())
        await self._ending.wait()
        looking.cancel()
        _log.info("draining", extra={"seconds": settings.drain_seconds})
        await self.require("draining", there=False)
        await self.server.stop(settings.drain_seconds)

    async def _keep_looking(self) -> None:
        while True:
            try:
                await self._look()
            except Exception:
                _log.exception("a look at the process failed")
            await asyncio.sleep(LOOK)

    async def _look(self) -> None:
        for what, there in self._needs.items():
            if (what not in self._missing) is not (found := there()):
                await self.require(what, there=found)
        hanging = frozenset(self.hanging)
        if hanging == self._told_hanging:
            return
        for pulse, _ in self._pulses:
            if pulse.name in hanging - self._told_hanging:
                _log.error("no progress", extra={"work": pulse.name, "seconds": round(pulse.seconds, 3)})
            elif pulse.name in self._told_hanging - hanging:
                _log.warning("progress", extra={"work": pulse.name})
        self._told_hanging = hanging
        await self.server.set_alive(not hanging)
        await self.require(_PROGRESS, there=not hanging)

    async def _tell(self) -> None:
        ready = not self._missing
        await self.server.set_ready(ready)
        if ready and not self._was_ready:
            seconds = round(time.monotonic() - self._began, 3)
            _log.info("ready", extra={"target": self.server.target, "http": self._http, "seconds": seconds})
        elif self._was_ready and ready != self._ready and not self.draining:
            _log.info("ready again" if ready else "not ready", extra={"missing": list(self.missing)})
        self._ready = ready
        self._was_ready |= ready


def run(
    role: str,
    kind: type[S],
    serve: Role[S],
    *,
    program: str | None = None,
    message_bytes: int = limits.WORKER_MESSAGE_BYTES,
    argv: Sequence[str] | None = None,
    stalled: float = STALLED,
    overtime: float = OVERTIME,
) -> NoReturn:
    """Runs a role until it is told to end, and ends the process.

    Args:
        role: what the log calls it, for example `encoder`.
        kind: its settings.
        serve: the role itself.
        program: what its command line begins with; by default as it was started.
        message_bytes: bytes of one message, at most, both ways.
        argv: by default the process's own.
        stalled, overtime: seconds, as the constants of these names.
    """
    try:
        settings = load(kind, sys.argv[1:] if argv is None else argv, program=program or _program(kind))
        faulty.check(parse(settings.failpoints))
    except SettingsError as error:
        _refuse(error)
    log.configure(settings.log_format)

    async def made() -> Process:  # gRPC's server takes the loop that it is made in
        return Process(role, settings, message_bytes=message_bytes, stalled=stalled, overtime=overtime)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        process = runner.run(made())
        try:
            runner.run(process.live(serve, settings))
        except Exception as error:
            if isinstance(error, ChiasmError | OSError) and not process.listening:
                _refuse(error)
            _log.exception("failed")
            sys.exit(FAILED)
    if process.refused is not None:
        _refuse(process.refused)
    sys.exit(0)


def _refuse(error: ChiasmError | OSError) -> NoReturn:
    sys.stderr.write("".join(f"{line}\n" for line in lines(error)))
    sys.exit(REFUSED)


def lines(error: ChiasmError | OSError) -> tuple[str, str, str]:
    """Why a process did not start, for people: what, where, and what to do."""
    if isinstance(error, SettingsError):
        what, where, fix = error.what, error.where, error.fix
    elif isinstance(error, CheckpointError):
        what, where = "; ".join(error.problems), error.where
        fix = "--model takes digits, the folder of a checkpoint, or a hub name (owner/name)"
    elif isinstance(error, OSError):
        what, where = error.strerror or str(error), str(error.filename or type(error).__name__)
        taken = error.errno == errno.EADDRINUSE
        another = "choose another with --listen or --http"
        fix = f"{another}, or end who has it" if taken else another
    else:
        what = error.message if isinstance(error, StatusError) else str(error)
        where, fix = error.reason, _FIXES.get(error.reason, "change what it names, and start again")
    return f"error: {what}", f"  where  {where}", f"  fix    {fix}"


def _seconds(pulse: Pulse) -> float:
    return pulse.seconds


def _program(kind: type[RoleSettings]) -> str:
    return f"python -m {kind.__module__.partition('.')[0]}"


def _at_end_of_input(then: Callable[[], object], seconds: float) -> None:
    """Calls `then` from a thread when standard input ends, which it does however its other end dies; and ends the
    process `seconds` later, even if nothing in it moves any more."""

    def follow() -> None:
        with suppress(OSError):  # an input that cannot be read has ended too
            while os.read(0, 4096):
                pass
        _end_after(seconds)
        then()

    threading.Thread(target=follow, name="stdin", daemon=True).start()


def _end_after(seconds: float) -> None:
    def end() -> None:
        _log.error("the process did not end by itself")
        logging.shutdown()
        os._exit(FAILED)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
