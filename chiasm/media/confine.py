"""What a worker gives up before it reads a stranger's file. Linux; knows nothing of media.

Three rings. The kernel's limits on memory, files, core dumps and processes always hold, on any POSIX system. Leaving
the network and dropping capabilities and privileges are asked for where the kernel lets an ordinary process do so. A
system call filter refuses what no decoder does: sockets, programs, signals and other reaches into a process, anything
that changes the file system. Reading files is not refused.

Where the kernel can filter and `MACHINES` lists the processor, the filter is installed or `confine` fails. On another
processor, and on a kernel built without filters, there is none, and the first two rings are all there is.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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

# Arguments by which a harmless call reaches another process: who is sent a file's signal and which one, keystrokes for
# a terminal, attributes of a file, and the wish to die with the parent. From asm-generic/fcntl.h, asm-generic/ioctls.h,
# asm-generic/sockios.h, linux/tty.h, linux/fs.h.
_FCNTL = (8, 10, 15)  # F_SETOWN, F_SETSIG, F_SETOWN_EX
_IOCTL = (
    *(0x8901, 0x8902),  # FIOSETOWN, SIOCSPGRP
    *(0x5410, 0x5412, 0x541C, 0x40045436),  # TIOCSPGRP, TIOCSTI, TIOCLINUX, TIOCSIG
    *(0x40086602, 0x401C5820),  # FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR
)
_PRCTL = (_PR_SET_PDEATHSIG,)

# From here on the machines number their calls alike.
_RECENT = (
    *(424, 434, 435, 437, 438),  # pidfd_send_signal, pidfd_open, clone3, openat2, pidfd_getfd
    *(425, 426, 427),  # io_uring, whose work this filter does not see
    *(428, 429, 430, 431, 432, 433, 442, 467),  # open_tree, move_mount, fs*, mount_setattr, open_tree_attr
    *(440, 447, 448),  # process_madvise, memfd_secret, process_mrelease
    *(452, 463, 466, 469),  # fchmodat2, setxattrat, removexattrat, file_setattr
)


@dataclass(frozen=True, slots=True)
class Machine:
    """The calls of one processor architecture, by number. From asm/unistd_64.h and asm-generic/unistd.h."""

    architecture: int
    """Its audit number."""
    refused: Sequence[int]
    opens: Mapping[int, int]
    """Calls that open a file, with the place of their flags: refused when they would write."""
    commands: Mapping[int, tuple[int, Sequence[int]]]
    """Calls that do many things, with the place of the argument that says which, and its values that are refused."""
    limits: int
    """prlimit64: for this process, which it calls 0, and for no other."""


MACHINES: Mapping[str, Machine] = {
    "x86_64": Machine(
        0xC000003E,
        (
            *(41, 42, 49, 50, 53),  # socket, connect, bind, listen, socketpair
            *(56, 57, 58),  # clone, fork, vfork
            *(59, 322),  # execve, execveat
            *(62, 200, 234, 129, 297),  # kill, tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo
            *(101, 310, 311, 312, 274),  # ptrace, process_vm_*, kcmp, get_robust_list
            *(141, 142, 144, 203, 251, 256, 279, 314),  # setpriority, sched_set*, ioprio_set, migrate_pages, move_pages
            *(29, 30, 31, 64, 65, 66, 68, 69, 70, 71, 220),  # shm*, sem*, msg*
            *(240, 241, 319),  # mq_open, mq_unlink, memfd_create
            *(76, 82, 83, 84, 85, 86, 87, 88),  # truncate, rename, mkdir, rmdir, creat, link, unlink, symlink
            *(90, 91, 92, 93, 94, 133, 161, 165, 166),  # chmod, fchmod, *chown, mknod, chroot, mount, umount2
            *(258, 259, 260, 263, 264, 265, 266, 268, 316),  # the same at a directory
            *(132, 235, 261, 280, 188, 189, 190, 197, 198, 199),  # utime*, futimesat, *setxattr, *removexattr
            *(303, 304),  # name_to_handle_at, open_by_handle_at
            *(248, 249, 250, 272, 298, 308, 321, 323, 206),  # keys, unshare, perf, setns, bpf, userfaultfd, io_setup
            *_RECENT,
        ),
        {2: 1, 257: 2},  # open, openat
        {72: (1, _FCNTL), 16: (1, _IOCTL), 157: (0, _PRCTL)},
        302,
    ),
    "aarch64": Machine(
        0xC00000B7,
        (
            *(198, 199, 200, 201, 203),
            220,
            *(221, 281),
            *(129, 130, 131, 138, 240),
            *(117, 270, 271, 272, 100),
            *(140, 118, 119, 122, 30, 238, 239, 274),
            *(186, 187, 188, 189, 190, 191, 192, 193, 194, 195, 196),
            *(180, 181, 279),
            *(33, 34, 35, 36, 37, 38, 39, 40, 45, 276),
            *(51, 52, 53, 54, 55),
            *(88, 5, 6, 7, 14, 15, 16),
            *(264, 265),
            *(217, 218, 219, 97, 241, 268, 280, 282, 0),
            *_RECENT,
        ),
        {56: 2},  # openat
        {25: (1, _FCNTL), 29: (1, _IOCTL), 167: (0, _PRCTL)},
        261,
    ),
}


def confine(memory_bytes: int, open_files: int) -> None:
    """Gives up, for good, what reading a picture does not need. Called once, before the first byte is read.

    memory_bytes: address space of this process. open_files: how many files it may have open.

    Raises:
        OSError, ValueError: a limit could not be set, or the kernel has filters and did not take this one.
    """
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
        install(libc, platform.machine())
    # Neither threads nor children from here on. Root is exempt from this limit, not from the filter.
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def install(libc: ctypes.CDLL, machine: str) -> bool:
    """Installs the filter for this process. False where there is none: an unlisted machine, a kernel without filters.

    Raises:
        OSError: the kernel can filter and refused this filter.
    """
    if machine not in MACHINES:
        return False
    # prctl(2): EFAULT for a filter that is nowhere says that the kernel would have read one, EINVAL that it has none.
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, None, 0, 0) != 0 and ctypes.get_errno() == errno.EINVAL:
        return False
    code = program(MACHINES[machine])
    buffer = ctypes.create_string_buffer(code, len(code))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))

    whole = Program(len(code) // 8, ctypes.addressof(buffer))
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(whole), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the kernel refused the system call filter")
    return True


def program(machine: Machine) -> bytes:
    """The filter in the kernel's instruction format (eight bytes each): everything is allowed but what is refused."""

    def step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("=HBBI", code, if_true, if_false, value)

    def with_argument(number: int, place: int, tests: Sequence[bytes]) -> list[bytes]:
        # Flags, commands and process ids have 32 bits, the lower half of the argument: what the kernel reads of it.
        return [
            step(_JUMP_EQUAL, number, 0, len(tests) + 2),
            step(_LOAD, _ARGUMENTS_AT + 8 * place),
            *tests,
            step(_RETURN, _ALLOW),
        ]

    refuse = step(_RETURN, _REFUSE)
    lines = [
        step(_LOAD, _ARCHITECTURE_AT),
        step(_JUMP_EQUAL, machine.architecture, 1, 0),
        refuse,
        step(_LOAD, _NUMBER_AT),
        step(_JUMP_GREATER_EQUAL, 0x40000000, 0, 1),  # a second set of numbers for the same calls
        refuse,
    ]
    for number in machine.refused:
        lines += [step(_JUMP_EQUAL, number, 0, 1), refuse]
    for number, place in machine.opens.items():
        lines += with_argument(number, place, [step(_JUMP_SET, _OPEN_TO_WRITE, 0, 1), refuse])
    for number, (place, values) in machine.commands.items():
        tests = [line for value in values for line in (step(_JUMP_EQUAL, value, 0, 1), refuse)]
        lines += with_argument(number, place, tests)
    lines += with_argument(machine.limits, 0, [step(_JUMP_EQUAL, 0, 1, 0), refuse])
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
