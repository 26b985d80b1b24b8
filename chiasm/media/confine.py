"""What a worker gives up before it reads a stranger's file. Linux; knows nothing of media.

Three rings. The kernel's limits on memory, files, core dumps and processes always hold, on any POSIX system. Leaving
the network and dropping capabilities and privileges are asked for where the kernel lets an ordinary process do so. A
system call filter refuses what no decoder does: sockets, programs, signals, anything that changes the file system.
"""

from __future__ import annotations

import ctypes
import errno
import math
import platform
import resource
import signal
import struct
import sys
from collections.abc import Sequence

# linux/prctl.h, linux/sched.h, linux/capability.h
_PR_SET_PDEATHSIG = 1
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2
_CLONE_NEWNET = 0x40000000
_CLONE_NEWUSER = 0x10000000
_CAPABILITY_VERSION_3 = 0x20080522

# linux/filter.h and linux/seccomp.h: the few instructions the filter needs.
_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_OPEN_TO_WRITE = 0o1 | 0o2 | 0o100 | 0o1000  # O_WRONLY, O_RDWR, O_CREAT, O_TRUNC

# For each machine: its audit number, its calls that open a file with the place of their flags, and the calls refused.
# From asm/unistd_64.h and asm-generic/unistd.h.
_MACHINES: dict[str, tuple[int, dict[int, int], Sequence[int]]] = {
    "x86_64": (
        0xC000003E,
        {2: 1, 257: 2},  # open, openat
        (
            *(41, 42, 49, 50, 53),  # socket, connect, bind, listen, socketpair
            *(56, 57, 58, 435),  # clone, fork, vfork, clone3
            *(59, 322),  # execve, execveat
            *(62, 200, 234, 101, 310, 311, 438),  # kill, tkill, tgkill, ptrace, process_vm_*, pidfd_getfd
            *(76, 82, 83, 84, 85, 86, 87, 88),  # truncate, rename, mkdir, rmdir, creat, link, unlink, symlink
            *(90, 91, 92, 93, 94, 133, 165, 166),  # chmod, fchmod, chown, fchown, lchown, mknod, mount, umount2
            *(258, 259, 260, 263, 264, 265, 266, 268, 316, 437),  # the same at a directory, openat2
            *(248, 249, 250, 272, 298, 308, 321, 323, 425),  # keys, unshare, perf, setns, bpf, userfaultfd, io_uring
        ),
    ),
    "aarch64": (
        0xC00000B7,
        {56: 2},  # openat
        (
            *(198, 199, 200, 201, 203),
            *(220, 435),
            *(221, 281),
            *(129, 130, 131, 117, 270, 271, 438),
            *(33, 34, 35, 36, 37, 38, 39, 40, 45, 276),
            *(52, 53, 54, 55, 437),
            *(217, 218, 219, 97, 241, 268, 280, 282, 425),
        ),
    ),
}


def confine(memory_bytes: int, open_files: int) -> None:
    """Gives up, for good, what reading a picture does not need. Called once, before the first byte is read."""
    for limit, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_NOFILE, open_files),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET)
        # A new user namespace comes with every capability inside it; these, and root's own, are not needed either.
        libc.capset((ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)())
        # After the namespace: the kernel forgets this wish when credentials change.
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        _filter(libc)
    # Neither threads nor children from here on. Root is exempt from this limit, not from the filter.
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def _filter(libc: ctypes.CDLL) -> None:
    machine = _MACHINES.get(platform.machine())
    if machine is None:
        return
    code = program(*machine)
    buffer = ctypes.create_string_buffer(code, len(code))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))

    whole = Program(len(code) // 8, ctypes.addressof(buffer))
    libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(whole), 0, 0)


def program(architecture: int, opens: dict[int, int], refused: Sequence[int]) -> bytes:
    """The filter in the kernel's instruction format (eight bytes each): everything is allowed but what is refused."""

    def step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("=HBBI", code, if_true, if_false, value)

    lines = [
        step(_LOAD, _ARCHITECTURE_AT),
        step(_JUMP_EQUAL, architecture, 1, 0),
        step(_RETURN, _REFUSE),
        step(_LOAD, _NUMBER_AT),
        step(_JUMP_GREATER_EQUAL, 0x40000000, 0, 1),  # a second set of numbers for the same calls
        step(_RETURN, _REFUSE),
    ]
    for number in refused:
        lines += [step(_JUMP_EQUAL, number, 0, 1), step(_RETURN, _REFUSE)]
    for number, place in opens.items():
        lines += [
            step(_JUMP_EQUAL, number, 0, 4),
            step(_LOAD, _ARGUMENTS_AT + 8 * place),
            step(_JUMP_SET, _OPEN_TO_WRITE, 0, 1),
            step(_RETURN, _REFUSE),
            step(_RETURN, _ALLOW),
        ]
    return b"".join([*lines, step(_RETURN, _ALLOW)])


def arm(seconds: float) -> None:
    """Ends this process by SIGPROF after so many seconds of processor time. Waiting for a reader takes none."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    # Behind the timer, which a parser that has been taken over could switch off, the kernel's own limit.
    soft = math.ceil(used.ru_utime + used.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
    signal.setitimer(signal.ITIMER_PROF, seconds)


def disarm() -> None:
    """Stops the clock of `arm`."""
    signal.setitimer(signal.ITIMER_PROF, 0)
