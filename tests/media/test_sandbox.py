"""The worker processes: what a crash, a bomb or an impatient caller costs, and that nothing stays behind."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import resource
import signal
import subprocess
import sys
from contextlib import aclosing, suppress
from pathlib import Path
from typing import NoReturn, cast

import numpy as np
import pytest

from chiasm.errors import InvalidRequest, Overloaded, ServerError
from chiasm.media import confine, framing
from chiasm.media.listed import Listed
from chiasm.media.sandbox import LONG, Sandbox
from chiasm.media.types import Decoded, Frame, Limits, MediaSource
from tests.media import make
from tests.media.ask import frames, listed, opened, refusal
from tests.waiting import alive, gone

_ROOT = Path(__file__).parents[2]
PICTURE = MediaSource("image", data=make.save(make.scene()))


def large_video(count: int = 12) -> MediaSource:
    """Frames of 2.8 MB: the socket holds less than one of them, so a worker waits for its reader."""
    return MediaSource("video", data=make.video([make.flat(720, 1280, (number, 0, 0)) for number in range(count)]))


async def test_nothing_is_started_before_it_is_used_and_nothing_is_left() -> None:
    sandbox = Sandbox(workers=2)
    assert sandbox.pids == frozenset()
    await asyncio.gather(*(sandbox.probe(PICTURE) for _ in range(6)))
    pids = sandbox.pids
    assert 1 <= len(pids) <= 2
    assert all(alive(pid) for pid in pids)
    await sandbox.close()
    await sandbox.close()
    assert not any(alive(pid) for pid in pids)
    with pytest.raises(RuntimeError):
        await sandbox.probe(PICTURE)


async def test_a_worker_is_kept_between_jobs_and_replaced_when_it_is_old() -> None:
    async with Sandbox(jobs_per_worker=3) as sandbox:
        seen = []
        for _ in range(6):
            await sandbox.probe(PICTURE)
            seen.append(sandbox.pids)
        assert seen[0] == seen[1]
        assert seen[3] == seen[4]
        assert seen[0] != seen[3]
        assert seen[2] == seen[5] == frozenset()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV])
async def test_b17_one_crash_is_retried_and_no_frame_comes_twice(how: signal.Signals) -> None:
    async with Sandbox() as sandbox, aclosing(sandbox.decode(large_video(), range(12))) as events:
        shown = []
        async for event in events:
            shown.append(event)
            if len(shown) == 5:
                (pid,) = sandbox.pids
                os.kill(pid, how)
                await gone(pid)
        *given, ending = shown
        assert [event.index for event in given if isinstance(event, Frame)] == list(range(12))
        assert all(abs(int(e.rgb[0, 0, 0]) - e.index) <= 2 for e in given if isinstance(e, Frame))
        assert ending == Decoded(12, False)


async def test_b17_a_second_crash_refuses_the_medium_and_spares_the_neighbour() -> None:
    """Two requests side by side; the worker of the first is killed twice."""
    async with Sandbox(workers=2) as sandbox:
        neighbour_events = sandbox.decode(large_video(6), range(6))
        neighbour = [await anext(neighbour_events)]
        spared = sandbox.pids

        async def doomed() -> None:
            async for _ in sandbox.decode(large_video(), range(12), item="messages[0].content[1]"):
                (pid,) = sandbox.pids - spared
                os.kill(pid, signal.SIGSEGV)
                await gone(pid)

        with pytest.raises(InvalidRequest) as caught:
            await doomed()
        assert (caught.value.reason, caught.value.item) == ("POISON_INPUT", "messages[0].content[1]")
        assert caught.value.facts == {"attempts": 2}
        neighbour += [event async for event in neighbour_events]
        assert [event.index for event in neighbour if isinstance(event, Frame)] == list(range(6))
        assert sandbox.pids == spared
        assert (await sandbox.probe(PICTURE)).found == "PNG"


async def test_b16_processor_time_is_limited_for_each_medium() -> None:
    async with Sandbox(limits=Limits(cpu_seconds=0.5)) as sandbox:
        slow = MediaSource("image", data=make.slow_jpeg())
        error = await refusal(sandbox, slow)
        assert (error.reason, error.facts) == ("MEDIA_DECODE_FAILED", {"cause": "time_limit", "limit": 0.5})
        # The time is a job's own: many short ones after another are none the worse for their sum.
        for _ in range(5):
            assert (await frames(sandbox, PICTURE))[1].frames == 1


async def test_b16_the_pictures_of_a_list_have_the_processor_time_of_one_file() -> None:
    async with Sandbox(limits=Limits(cpu_seconds=1.5)) as sandbox:
        one = make.slow_jpeg(scans=200)
        assert (await refusal(sandbox, listed([one] * 40, range(40)))).facts["cause"] == "time_limit"
        assert (await opened(sandbox, listed([one], None, "image")))[0], "each alone has time enough"


async def test_the_pictures_of_a_list_make_their_worker_older_by_one_job() -> None:
    async with Sandbox(jobs_per_worker=4) as sandbox:
        await sandbox.probe(PICTURE)
        before = sandbox.pids
        await opened(sandbox, listed([make.save(make.scene())] * 10, range(10)))
        assert sandbox.pids == before, "it was probed and opened: two jobs"
        await sandbox.probe(PICTURE)
        assert sandbox.pids == frozenset()


async def test_a_list_that_waits_for_its_next_picture_holds_no_worker() -> None:
    async with Sandbox() as sandbox:
        waiting = Listed(sandbox, "video", 2, (0.0, 1.0))
        picture = make.save(make.scene())
        await waiting.probe(picture)
        await waiting.open(picture)
        assert (await frames(sandbox, PICTURE))[1].frames == 1
        await waiting.open(picture)
        assert len(sandbox.pids) == 1


async def test_a_video_that_waits_for_its_reader_keeps_nobody_else_from_being_opened() -> None:
    async with Sandbox() as sandbox, aclosing(sandbox.decode(large_video(), range(12))) as events:
        shown = [await anext(events)]
        assert (await sandbox.probe(PICTURE)).found == "PNG"
        shown.append(await anext(events))
        assert (await frames(sandbox, PICTURE))[1].frames == 1
        assert len(sandbox.pids) == 2
        shown += [event async for event in events]
        assert shown[-1] == Decoded(12, False)
        assert [event.index for event in shown if isinstance(event, Frame)] == [*range(12)]


async def test_so_many_videos_wait_for_their_readers_a_further_one_waits_for_them_and_no_picture_does() -> None:
    async with Sandbox() as sandbox:
        videos = [sandbox.decode(large_video(), range(12)) for _ in range(LONG)]
        for video in videos:
            await anext(video)
        further = asyncio.create_task(frames(sandbox, large_video()))
        await asyncio.sleep(0.05)
        assert not further.done() and len(sandbox.pids) == LONG
        assert (await frames(sandbox, PICTURE))[1].frames == 1
        await videos[1].aclose()
        assert (await further)[1].frames == 1
        for video in videos:
            await video.aclose()
        assert len(sandbox.pids) <= LONG + 1


async def test_a_picture_whose_reader_takes_its_time_holds_no_process() -> None:
    async with Sandbox() as sandbox, aclosing(sandbox.decode(PICTURE, (0,))) as events:
        await anext(events)
        assert (await sandbox.probe(PICTURE)).found == "PNG"
        assert len(sandbox.pids) == 1


async def test_b86_waiting_for_the_reader_is_not_processor_time() -> None:
    async with Sandbox(limits=Limits(cpu_seconds=1.0)) as sandbox:
        shown = []
        async for event in sandbox.decode(large_video(), range(12)):
            shown.append(event)
            await asyncio.sleep(0.15)
        assert shown[-1] == Decoded(12, False)


async def test_memory_is_limited_and_the_worker_lives_on_or_is_replaced() -> None:
    async with Sandbox(limits=Limits(memory_bytes=512 * 2**20)) as sandbox:
        error = await refusal(sandbox, make.bomb_png(9_000, 9_000))
        assert (error.reason, error.facts) == ("MEDIA_DECODE_FAILED", {"cause": "memory_limit"})
        assert (await frames(sandbox, PICTURE))[1].frames == 1


async def test_leaving_a_short_job_costs_no_process() -> None:
    """Many callers leave early. Starting a process for each would take the processors from everybody else."""
    async with Sandbox() as sandbox:
        await sandbox.probe(PICTURE)
        before = sandbox.pids
        for _ in range(10):
            task = asyncio.create_task(frames(sandbox, PICTURE))
            await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        for _ in range(3):
            async with aclosing(sandbox.decode(PICTURE, (0,))) as events:
                await anext(events)
        assert (await sandbox.probe(PICTURE)).found == "PNG"
        assert sandbox.pids == before


async def test_an_abandoned_job_holds_its_turn_until_it_has_ended() -> None:
    """Otherwise those who come and leave would start one process after another."""
    async with Sandbox() as sandbox:
        for _ in range(3):
            async with aclosing(sandbox.decode(large_video(), range(12))) as events:
                await anext(events)
            assert len(sandbox.pids) == 1
        assert (await sandbox.probe(PICTURE)).found == "PNG"
        assert len(sandbox.pids) == 1


async def test_cancelling_frees_the_worker() -> None:
    async with Sandbox() as sandbox:
        task = asyncio.create_task(frames(sandbox, MediaSource("image", data=make.slow_jpeg())))
        while not sandbox.pids:  # noqa: ASYNC110  (the job itself is the event, and it goes on)
            await asyncio.sleep(0.01)
        (busy,) = sandbox.pids
        waiting = asyncio.create_task(sandbox.probe(PICTURE))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert (await waiting).found == "PNG"
        await gone(busy)


async def test_cancelling_while_waiting_for_a_turn_costs_nothing() -> None:
    async with Sandbox() as sandbox:
        events = sandbox.decode(large_video(), range(12))
        shown = [await anext(events)]
        waiting = asyncio.create_task(sandbox.probe(PICTURE))
        await asyncio.sleep(0.05)
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
        shown += [event async for event in events]
        assert shown[-1] == Decoded(12, False)
        assert (await sandbox.probe(PICTURE)).found == "PNG"


async def test_closing_ends_a_job_in_the_middle() -> None:
    sandbox = Sandbox()
    events = sandbox.decode(large_video(), range(12))
    await anext(events)
    (busy,) = sandbox.pids
    await sandbox.close()
    assert not alive(busy)
    with pytest.raises(RuntimeError):
        await anext(events)
    assert sandbox.pids == frozenset()


async def test_closing_wakes_whoever_waits_for_an_answer() -> None:
    sandbox = Sandbox()
    waiting = [asyncio.create_task(frames(sandbox, MediaSource("image", data=make.slow_jpeg()))) for _ in range(2)]
    while not sandbox.pids:  # noqa: ASYNC110  (as above)
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    await sandbox.close()
    for task in waiting:
        with pytest.raises(RuntimeError):
            await task


_CONFINED = """
import ctypes, errno, os, platform, signal, socket
from pathlib import Path
from chiasm.media.confine import confine
parent = os.getppid()
handle = os.pidfd_open(parent)
pipe, _ = os.pipe()
libc = ctypes.CDLL(None, use_errno=True)
confine(2**31, 32)

def refused(what):
    try:
        what()
    except (PermissionError, BlockingIOError):
        return
    raise SystemExit(f"{what} went through")

# x86_64 and aarch64, one call each; unsigned words, as the kernel gets them.
calls = [
    ("kill", 62, 129, (parent, signal.SIGUSR1)),
    ("tkill", 200, 130, (parent, signal.SIGUSR1)),
    ("tgkill", 234, 131, (parent, parent, signal.SIGUSR1)),
    ("rt_sigqueueinfo", 129, 138, (parent, signal.SIGUSR1, "info")),
    ("rt_tgsigqueueinfo", 297, 240, (parent, parent, signal.SIGUSR1, "info")),
    ("pidfd_send_signal", 424, 424, (handle, signal.SIGUSR1, 0, 0)),
    ("pidfd_open", 434, 434, (parent, 0)),
    ("pidfd_getfd", 438, 438, (handle, 0, 0)),
    ("prlimit64 reads", 302, 261, (parent, 7, 0, "info")),
    ("prlimit64 sets", 302, 261, (parent, 7, "limit", 0)),
    ("prlimit64 by another name", 302, 261, (parent | 1 << 32, 7, "limit", 0)),
    ("ptrace", 101, 117, (16, parent, 0, 0)),
    ("process_vm_readv", 310, 270, (parent, 0, 0, 0, 0, 0)),
    ("process_vm_writev", 311, 271, (parent, 0, 0, 0, 0, 0)),
    ("process_madvise", 440, 440, (handle, 0, 0, 20, 0)),
    ("process_mrelease", 448, 448, (handle, 0)),
    ("kcmp", 312, 272, (parent, parent, 0, 0, 0)),
    ("get_robust_list", 274, 100, (parent, "info", "limit")),
    ("setpriority", 141, 140, (0, parent, 19)),
    ("sched_setaffinity", 203, 122, (parent, 0, 0)),
    ("sched_setscheduler", 144, 119, (parent, 0, "zero")),
    ("ioprio_set", 251, 30, (1, parent, 0)),
    ("move_pages", 279, 239, (parent, 0, 0, 0, 0, 0)),
    ("fcntl F_SETOWN", 72, 25, (pipe, 8, parent)),
    ("fcntl F_SETSIG", 72, 25, (pipe, 10, signal.SIGUSR1)),
    ("fcntl F_SETOWN_EX", 72, 25, (pipe, 15, "zero")),
    ("ioctl FIOSETOWN", 16, 29, (pipe, 0x8901, "zero")),
    ("ioctl TIOCSTI", 16, 29, (pipe, 0x5412, "zero")),
    ("prctl PR_SET_PDEATHSIG", 157, 167, (1, 0, 0, 0, 0)),
    ("shmget", 29, 194, (0, 4096, 0o1600)),
    ("msgget", 68, 186, (0, 0o1600)),
    ("mq_open", 240, 180, ("zero", 0, 0, 0)),
    ("memfd_create", 319, 279, ("zero", 0)),
    ("utimensat", 280, 88, (-100, "zero", 0, 0)),
    ("setxattr", 188, 5, ("zero", "zero", 0, 0, 0)),
    ("fchmodat2", 452, 452, (-100, "zero", 0, 0)),
    ("name_to_handle_at", 303, 264, (-100, "zero", 0, 0, 0)),
    ("perf_event_open", 298, 241, ("zero", 0, -1, -1, 0)),
    ("add_key", 248, 217, (0, 0, 0, 0, 0)),
    ("keyctl", 250, 219, (0, 0, 0, 0, 0)),
    ("bpf", 321, 280, (0, "zero", 64)),
    ("userfaultfd", 323, 282, (1,)),
    ("io_uring_setup", 425, 425, (1, "zero")),
    ("io_setup", 206, 0, (1, "zero")),
    ("open_tree", 428, 428, (-100, "zero", 0)),
]
info = (ctypes.c_int * 32)(signal.SIGUSR1, 0, -1)  # SI_QUEUE
words = {"info": info, "limit": (ctypes.c_uint64 * 2)(9, 9), "zero": ctypes.create_string_buffer(128)}
column = {"x86_64": 0, "aarch64": 1}.get(platform.machine())
for name, *numbers, arguments in calls if column is not None else []:
    given = [words[word] if isinstance(word, str) else ctypes.c_long(word) for word in arguments]
    ctypes.set_errno(0)
    if libc.syscall(ctypes.c_long(numbers[column]), *given) != -1 or ctypes.get_errno() != errno.EPERM:
        raise SystemExit(f"{name} went through: {ctypes.get_errno()}")

refused(lambda: open(os.path.join(os.getcwd(), "pyproject.toml"), "a"))
refused(lambda: os.unlink(os.path.join(os.getcwd(), "no-such-file")))
refused(lambda: socket.socket())
refused(lambda: os.kill(parent, 0))
refused(lambda: os.execv("/bin/true", ["true"]))
refused(os.fork)
assert open(os.path.join(os.getcwd(), "pyproject.toml")).read(1)
"""


def test_a_confined_process_reads_and_does_nothing_else() -> None:
    received: list[int] = []
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    previous = signal.signal(signal.SIGUSR1, lambda number, _: received.append(number))
    try:
        subprocess.run([sys.executable, "-c", _CONFINED], check=True, cwd=_ROOT)
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert received == []
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before


_STILL_WORKS = """
import resource, os
from chiasm.media.confine import arm, confine, disarm
confine(2**31, 32)
arm(5.0)
assert resource.getrlimit(resource.RLIMIT_CPU)[0] < 60
assert resource.prlimit(0, resource.RLIMIT_NOFILE) == (32, 32)
disarm()
os.set_inheritable(1, True)
os.set_blocking(1, True)
"""


def test_a_confined_process_may_limit_itself() -> None:
    subprocess.run([sys.executable, "-c", _STILL_WORKS], check=True, cwd=_ROOT)


class Kernel:
    """A C library whose kernel answers calls of prctl with these error numbers, one after another; 0 is success."""

    def __init__(self, *answers: int) -> None:
        self.answers = list(answers)

    def prctl(self, *_: object) -> int:
        answer = self.answers.pop(0)
        ctypes.set_errno(answer)
        return -1 if answer else 0


@pytest.mark.parametrize("machine", sorted(confine.MACHINES))
def test_a_filter_that_the_kernel_refuses_is_an_error(machine: str) -> None:
    for reason in (errno.EINVAL, errno.EACCES, errno.ENOMEM):
        with pytest.raises(OSError, match="refused the system call filter") as caught:
            confine.install(cast(ctypes.CDLL, Kernel(errno.EFAULT, reason)), machine)
        assert caught.value.errno == reason
    assert confine.install(cast(ctypes.CDLL, Kernel(errno.EFAULT, 0)), machine)


def test_without_filters_in_the_kernel_or_numbers_of_the_machine_there_is_none() -> None:
    assert not confine.install(cast(ctypes.CDLL, Kernel(errno.EINVAL)), "x86_64")
    assert not confine.install(cast(ctypes.CDLL, Kernel()), "sparc64")


@pytest.mark.parametrize("machine", confine.MACHINES.values(), ids=list(confine.MACHINES))
def test_the_filter_has_a_size_the_kernel_takes(machine: confine.Machine) -> None:
    assert len(confine.program(machine)) <= 8 * 4096  # BPF_MAXINSNS
    assert len(set(machine.refused)) == len(machine.refused)
    assert not set(machine.refused) & {*machine.opens, *machine.commands, machine.limits}


async def test_a_worker_that_cannot_be_confined_reads_nothing_and_the_medium_is_not_blamed() -> None:
    """More open files than any kernel grants."""
    async with Sandbox(limits=Limits(open_files=2**40)) as sandbox:
        with pytest.raises(ServerError) as caught:
            await sandbox.probe(PICTURE, item="messages[0].content[0]")
        assert (caught.value.reason, caught.value.item) == ("MEDIA_UNCONFINED", "messages[0].content[0]")
        assert sandbox.pids == frozenset()


async def test_a_worker_finds_modules_as_its_parent_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By the parent's list, not by its environment, which may have changed or belong to somebody else."""
    monkeypatch.setenv("PYTHONPATH", "/from/the/environment")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path, ""])
    async with Sandbox() as sandbox:
        await sandbox.probe(PICTURE)
        (pid,) = sandbox.pids
        _, _, names = given_up(pid)
    (path,) = (name.partition(b"=")[2].decode() for name in names if name.startswith(b"PYTHONPATH="))
    entries = path.split(os.pathsep)
    assert entries[0] == str(tmp_path)
    assert "/from/the/environment" not in entries
    assert all(os.path.isabs(entry) for entry in entries)


_READER = """
import asyncio, sys
from chiasm.media.sandbox import Sandbox
from chiasm.media.types import Frame, MediaSource
from tests.media.ask import forget_peak, peak_kib
async def main():
    source = MediaSource("video", data=sys.stdin.buffer.read())
    kept = []
    async with Sandbox() as sandbox:
        before = forget_peak()
        count = 0
        async for event in sandbox.decode(source, range(60)):
            count += isinstance(event, Frame)
            if sys.argv[1] == "keep":
                kept.append(event)
        assert count == 60
        print(peak_kib() - before)
asyncio.run(main())
"""


def test_pixels_are_not_held_ahead_of_the_reader() -> None:
    """A process that has had no other memory to fill again; the second reader shows that keeping them would be seen."""
    data = large_video(60).data
    grown = {}
    for how in ("drop", "keep"):
        reader = subprocess.run(
            [sys.executable, "-c", _READER, how], input=data, stdout=subprocess.PIPE, check=True, cwd=_ROOT
        )
        grown[how] = int(reader.stdout)
    assert grown["drop"] < 64 * 1024
    assert grown["keep"] > 128 * 1024  # all of them together have 158 MB


def given_up(pid: int) -> tuple[dict[str, tuple[str, str]], dict[str, str], list[bytes]]:
    """Limits, status and environment of a process."""
    about = Path(f"/proc/{pid}")
    rows = (row.rsplit(maxsplit=3) for row in (about / "limits").read_text().splitlines()[1:])
    limits = {row[0].strip(): (row[1], row[2]) for row in rows if len(row) == 4}
    status = dict(row.split(":", 1) for row in (about / "status").read_text().splitlines() if ":" in row)
    return limits, status, (about / "environ").read_bytes().split(b"\0")


async def test_the_worker_has_given_up_what_it_does_not_need() -> None:
    async with Sandbox(limits=Limits(memory_bytes=3 * 2**30, open_files=32)) as sandbox:
        await sandbox.probe(PICTURE)
        (pid,) = sandbox.pids
        limits, status, names = given_up(pid)
    assert limits["Max address space"] == (str(3 * 2**30),) * 2
    assert limits["Max open files"] == ("32", "32")
    assert limits["Max file size"] == ("0", "0")
    assert limits["Max core file size"] == ("0", "0")
    assert status["NoNewPrivs"].strip() == "1"
    assert int(status["CapEff"], 16) == 0
    assert int(status["Threads"]) == 1
    allowed = {b"PYTHONPATH", b"PYTHONDONTWRITEBYTECODE", b"LC_ALL", b""}
    assert {name.partition(b"=")[0] for name in names} - allowed <= {
        b"OMP_NUM_THREADS",
        b"OPENBLAS_NUM_THREADS",
        b"MKL_NUM_THREADS",
    }


_ORPHAN = """
import asyncio, os
from chiasm.media.sandbox import Sandbox
from tests.media import make
from tests.media.ask import MediaSource
async def main():
    sandbox = Sandbox()
    source = MediaSource("image", data=make.slow_jpeg())
    task = asyncio.ensure_future(sandbox.decode(source, (0,)).__anext__())
    while not sandbox.pids:
        assert not task.done()
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)
    os.write(1, str(*sandbox.pids).encode())
    os._exit(1)
asyncio.run(main())
"""


async def test_a_worker_does_not_outlive_its_parent() -> None:
    root = str(_ROOT)
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _ORPHAN, stdout=subprocess.PIPE, cwd=root, env={**os.environ, "PYTHONPATH": root}
    )
    out, _ = await parent.communicate()
    await gone(int(out))


def test_neither_side_loads_torch() -> None:
    names = ["sandbox", "worker", "image", "video", "animation", "open", "raw", "framing", "types"]
    code = "import sys\n" + "".join(f"import chiasm.media.{name}\n" for name in names)
    code += "assert not {'torch', 'transformers', 'grpc'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=_ROOT)


def test_the_parents_side_loads_no_decoder() -> None:
    code = "import sys, chiasm.media.sandbox\nassert not {'PIL', 'av', 'torch'} & set(sys.modules), sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=_ROOT)


@pytest.mark.parametrize("size", [0, 1, framing.MAX_HEADER + 1, 2**32 - 1])
def test_a_message_with_an_absurd_length_is_not_read(size: int) -> None:
    with pytest.raises(framing.BrokenFrame):
        framing.header_size(framing.PREFIX.pack(size))


@pytest.mark.parametrize(
    "body",
    [b"{", b"[]", b"\xff\xff", b"{}", b'{"parts":1}', b'{"parts":[-1]}', b'{"parts":[true]}', b'{"parts":["9"]}'],
)
def test_a_message_that_is_not_ours_is_not_understood(body: bytes) -> None:
    with pytest.raises(framing.BrokenFrame):
        framing.unpack(body)


def test_a_message_survives_the_way() -> None:
    packed = framing.pack({"is": "frame", "offset": 0.1}, [3, 0])
    body = packed[framing.PREFIX.size :]
    assert framing.header_size(packed[: framing.PREFIX.size]) == len(body)
    assert framing.unpack(body) == ({"is": "frame", "offset": 0.1}, [3, 0])
    with pytest.raises(ValueError, match="JSON"):
        framing.pack({"offset": float(np.nan)})


@pytest.mark.parametrize("lacking", ["descriptors", "processes", "handles"])
async def test_m46_a_machine_without_room_for_a_process_refuses_for_now_and_recovers(
    lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **options: object) -> NoReturn:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with Sandbox() as sandbox:
        before = len(os.listdir("/proc/self/fd"))
        try:
            if lacking == "descriptors":
                resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
            elif lacking == "processes":
                monkeypatch.setattr("chiasm.media.process.subprocess.Popen", refuse)
            else:
                monkeypatch.setattr("chiasm.media.process.os.pidfd_open", refuse)
            for _ in range(3):
                with pytest.raises(Overloaded) as caught:
                    await sandbox.probe(PICTURE)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            monkeypatch.undo()
        assert (caught.value.code, caught.value.reason) == ("RESOURCE_EXHAUSTED", "MEDIA_PROCESSES")
        assert caught.value.retryable and not sandbox.pids
        assert len(os.listdir("/proc/self/fd")) == before
        assert (await sandbox.probe(PICTURE)).found == "PNG"
