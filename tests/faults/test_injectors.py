"""Every injector takes effect on what it is for, and says so where it took none: each has a control, the same injector
at a target that it does not reach, and its `verify` must raise there."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest

from tests.faults.injectors import Injector, NoEffect, injected, needed
from tests.faults.injectors.clock import LIBRARY, Clock
from tests.faults.injectors.disk import FailingCalls, FullDisk
from tests.faults.injectors.limits import FewFiles, FewProcesses, LittleMemory, open_files
from tests.faults.injectors.network import Loss, Namespace, OneWay, Unplug, cabled
from tests.faults.injectors.points import Points
from tests.faults.injectors.processes import Kill, Stop
from tests.faults.proxy import tcp_proxy
from tests.mounts import tmpfs
from tests.processes import Role

DOES = """
import os, sys, threading, time
kept = []
for line in sys.stdin:
    try:
        match line.split():
            case ["open", path]: kept.append(open(path, "wb"))
            case ["touch", size]: kept.append(bytearray(os.urandom(1)) * int(size))
            case ["thread"]: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
            case ["write", path]:
                with open(path, "ab", buffering=0) as file: file.write(b"x")
    except (OSError, RuntimeError, MemoryError) as error:
        print(type(error).__name__, flush=True)
    else:
        print("done", flush=True)
"""
"""A process that does what it is told, a line each, and says what came of it."""


class Doer:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", DOES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid
        assert self.does("open", "/dev/null") == "done"

    def does(self, *words: object) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def doer() -> Iterator[Doer]:
    made = Doer()
    try:
        yield made
    finally:
        made.end()


def fails(fault: Injector) -> None:
    """The control: it was done to what it does not reach, and says so."""
    try:
        with pytest.raises(NoEffect):
            fault.inject()
            fault.verify()
    finally:
        with suppress(ProcessLookupError, NoEffect):
            fault.end()


# -- processes ---------------------------------------------------------------------------------------------------------


def test_a_process_is_killed_and_one_that_lives_on_is_noticed() -> None:
    with doer() as one, doer() as other:
        fault = Kill(one.pid)
        fault.inject()
        fault.verify()
        with pytest.raises(NoEffect):
            Kill(other.pid, seconds=0.2).verify()


def test_a_process_stands_still_and_one_that_goes_on_or_is_gone_is_noticed() -> None:
    with doer() as one:
        fault = Stop(one.pid)
        fault.inject()
        fault.verify()
        fault.end()
        assert one.does("open", "/dev/null") == "done"
        with pytest.raises(NoEffect):
            Stop(one.pid, seconds=0.2).verify()
    with pytest.raises(NoEffect):
        fault.verify()


# -- limits ------------------------------------------------------------------------------------------------------------


def test_files_run_out_and_a_limit_that_was_lifted_is_noticed() -> None:
    with doer() as one:
        before = resource.prlimit(one.pid, resource.RLIMIT_NOFILE)
        fault = FewFiles(one.pid, spare=1)
        fault.inject()
        fault.verify()
        assert not fault.exhausted()
        assert [one.does("open", "/dev/null") for _ in range(2)] == ["done", "OSError"]
        assert fault.exhausted() and open_files(one.pid) > 3
        resource.prlimit(one.pid, resource.RLIMIT_NOFILE, before)
        with pytest.raises(NoEffect):
            fault.verify()
        fault.end()
        assert one.does("open", "/dev/null") == "done"


def test_memory_runs_out_and_a_process_that_wants_none_is_noticed() -> None:
    with doer() as one, doer() as other:
        fault = LittleMemory(one.pid, 8 << 20)
        try:
            fault.inject()
            assert one.does("touch", 32 << 20) == "", "it was killed"
            fault.verify()
        finally:
            fault.end()
        fails(LittleMemory(other.pid, 64 << 20, seconds=0.2))
        assert other.does("touch", 32 << 20) == "done"


def test_threads_run_out_and_a_process_that_starts_none_is_noticed() -> None:
    with doer() as one, doer() as other:
        fault = FewProcesses(one.pid, spare=1)
        try:
            fault.inject()
            assert [one.does("thread") for _ in range(2)] == ["done", "RuntimeError"]
            fault.verify()
        finally:
            fault.end()
        assert one.does("thread") == "done"
        fails(FewProcesses(other.pid, seconds=0.2))


# -- disks -------------------------------------------------------------------------------------------------------------


def test_a_disk_is_full_and_the_wrong_one_is_noticed(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", "1m") as small, tmpfs(tmp_path / "other", "1m") as other:
        fault = FullDisk(small)
        fault.inject()
        fault.verify()
        with pytest.raises(NoEffect):
            FullDisk(other).verify()
        fault.end()
        (small / "again").write_bytes(bytes(1 << 10))
    if os.statvfs(tmp_path).f_bfree * os.statvfs(tmp_path).f_frsize > FullDisk.LARGEST:
        fails(FullDisk(tmp_path))


def test_writes_of_one_file_fail_and_a_process_that_writes_none_is_noticed(tmp_path: Path) -> None:
    needed("strace")
    (file := tmp_path / "log").touch()
    with doer() as one:
        fault = FailingCalls(one.pid, "write", "ENOSPC", path=file)
        try:
            fault.inject()
            assert one.does("write", file) == "OSError"
            assert one.does("write", tmp_path / "another") == "done"
            fault.verify()
        finally:
            fault.end()
        assert one.does("write", file) == "done"
        idle = FailingCalls(one.pid, "write", "ENOSPC", path=tmp_path / "nobody's", seconds=0.5)
        fails(idle)


# -- networks ----------------------------------------------------------------------------------------------------------


@contextmanager
def listening(namespace: Namespace) -> Iterator[int]:
    """Somebody who takes connections there."""
    made = namespace.call(lambda: socket.create_server((namespace.address, 0)))
    with made:
        yield made.getsockname()[1]


def test_a_cable_is_pulled_and_another_one_is_noticed() -> None:
    with cabled() as (one, other), listening(other) as port, cabled() as (stranger, _):
        fault = Unplug(one, other, port)
        fault.inject()
        fault.verify()
        fault.end()
        assert one.reaches(other.address, port)
        wrong = Unplug(one, other, port)
        stranger.ip("link", "set", "cable", "down")
        with pytest.raises(NoEffect):
            wrong.verify()


def test_answers_are_dropped_and_a_cable_that_carries_both_ways_or_none_is_noticed() -> None:
    with cabled() as (one, other), listening(one) as port:
        fault = OneWay(one, other, port)
        fault.inject()
        fault.verify()
        fault.end()
        with pytest.raises(NoEffect, match="answers come"):
            fault.verify()
        other.ip("link", "set", "cable", "down")
        with pytest.raises(NoEffect, match="nothing arrives"):
            fault.verify()


def test_packets_are_lost_and_a_link_that_loses_none_is_noticed() -> None:
    needed("nft")
    with cabled() as (one, other), listening(one) as port:
        fault = Loss(one, 30)
        fault.inject()
        try:
            reached = [other.reaches(one.address, port, seconds=30) for _ in range(8)]
            assert all(reached), "slower, no more"
            fault.verify()
        finally:
            fault.end()
        none = Loss(one, 0)
        none.inject()
        try:
            assert other.reaches(one.address, port)
            with pytest.raises(NoEffect):
                none.verify()
        finally:
            none.end()


@asynccontextmanager
async def echo() -> AsyncIterator[int]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(4096):
                writer.write(data)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def echoed(port: int, data: bytes) -> bytes:
    """What comes back in a second, up to as many bytes, over a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        back = b""
        with suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(1):
                while len(back) < len(data) and (part := await reader.read(4096)):
                    back += part
        return back
    finally:
        writer.close()


async def test_a_link_flips_cuts_swallows_and_half_closes_and_counts_what_it_did() -> None:
    async with echo() as port, tcp_proxy("127.0.0.1", port) as link:
        assert await echoed(link.port, b"0123456789") == b"0123456789"
        assert (link.flipped, link.cut, link.swallowed) == (0, 0, 0), "a link that is whole has done nothing"
        link.flip_at = link.passed + 4
        assert await echoed(link.port, b"0123456789") == b"0123556789" and link.flipped == 1
        link.cut_at = link.passed + 3
        assert await echoed(link.port, b"0123456789") == b"012" and link.cut == 1
        link.hole = True
        assert await echoed(link.port, b"0123456789") == b"" and link.swallowed == 10
        link.hole, link.half_closed = False, True
        assert await echoed(link.port, b"0123456789") == b"" and link.swallowed == 20
        link.half_closed = False
        assert await echoed(link.port, b"0123456789") == b"0123456789"


# -- clocks and failpoints ---------------------------------------------------------------------------------------------


@pytest.fixture
def role(tmp_path: Path) -> Iterator[Role]:
    """A process with the life of a role, which serves nothing."""
    made = Role("tests.rpc.role", ["fine"], tmp_path)
    yield made
    made.end()


LIBRARIES = [None, pytest.param(LIBRARY, marks=pytest.mark.skipif(LIBRARY is None, reason="libfaketime is not here"))]


@pytest.mark.parametrize("library", LIBRARIES, ids=["python", "libfaketime"])
def test_a_clock_is_shifted_and_one_that_nobody_looks_at_is_noticed(
    role: Role, tmp_path: Path, library: str | None
) -> None:
    clock = Clock(role, tmp_path, library=library, patience=0.3)
    clock.prepare()
    role.start()
    role.wait_for("ready")
    with pytest.raises(NoEffect):
        clock.verify()
    clock.inject()
    role.end()  # it has something to log
    clock.verify()


def test_a_failpoint_ends_its_process_and_one_that_nobody_reaches_is_noticed(role: Role, tmp_path: Path) -> None:
    role.start()
    fault = Points(role, "Info/response=exit", seconds=0.3)
    fault.inject()
    with pytest.raises(NoEffect):
        fault.verify()
    fault.end()
    assert role.event("failpoints") is None, "it runs again, without"


async def test_a_block_under_a_fault_that_did_nothing_does_not_run() -> None:
    class Nothing:
        ended = False

        def inject(self) -> None:
            assert threading.current_thread() is not threading.main_thread()

        def verify(self) -> None:
            raise NoEffect("nothing happened")

        def end(self) -> None:
            self.ended = True

    nothing = Nothing()
    with pytest.raises(NoEffect):
        async with injected(nothing):
            raise AssertionError("the block ran")
    assert nothing.ended
