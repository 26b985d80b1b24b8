"""A region: the bytes that all workers of a node share, as one file that is mapped once by each of them.

    Region.create(path, nbytes) -> Region           # FileExistsError if something is there
    Region.open(path) -> Region
    Region.open_or_create(path, nbytes) -> Region   # two that start at once get one region
    region.path, region.nbytes, region.arena_id     # arena_id: 16 random bytes, given when it was made
    region.body                                     # the bytes behind the header, zero when it was made
    region.try_lock() -> bool, region.unlock()      # one holder on the node
    region.slot, region.alive(slot)                 # who is who, and who still lives
    region.unlink()                                 # takes the name away; whoever has it mapped keeps it
    region.close()                                  # gives locks and slot back
    sweep(directory) -> list[Path]                  # removes the regions that no living process has open

The file is allocated in full before it can be used, so that a full machine refuses at the start and never kills a
writer later (`posix_fallocate`: a page that tmpfs cannot give afterwards is a SIGBUS). It belongs on a tmpfs.

All locks are OFD byte-range locks on places behind the file's end: the kernel drops them with the process that held
them, however it died, and they mean the same to processes that do not see each other's ids. Every process that has
the region open holds one byte of its own, its slot. A slot that is not held is of nobody or of the dead.

A process that was forked with a region open shares its slot and its lock, and must not use them. The file is for one
user (mode 0600): whoever may write it may also cut it short under a mapping, and is trusted not to.

This module knows bytes and locks. It knows no entry, and it does not load torch: the supervisor makes regions.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import stat
import struct
import threading
import time
from pathlib import Path
from typing import Self

from chiasm.errors import Unsupported

MIN_BYTES = 1 << 18
HEADER_BYTES = 4096
SLOTS = 1024
"""Processes that may have one region open at a time."""

_MAGIC = b"CHIASM\x00A"
_UNFINISHED = b"CHIASM\x00a"
"""Stands in the magic's place until a region is whole, so that one that was never finished can be told and removed."""

_VERSION = 2
"""Of region and ledger together: who opens one reads both."""
_HEADER = struct.Struct("<8sIIQ16s")  # magic, version, header bytes, bytes in all, arena id

_MUTEX = 1 << 48
_FIRST_SLOT = _MUTEX + 1
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid

_PATIENCE = 60.0
"""Seconds that one who opens waits for the one who makes: allocating goes at a GB in a second or two."""


class _NotYet(Exception):
    """The file is there and no region yet, or no region any more."""


class Region:
    """A mapped region, from `create`, `open` or `open_or_create`.

    Attributes:
        arena_id: 16 bytes.
        body: writable, unsigned bytes, all but the header.
        slot: of this process, 0 to `SLOTS` - 1. Held until `close` or the process's end.
    """

    def __init__(self, path: Path, fd: int, nbytes: int, arena_id: bytes, slot: int) -> None:
        self.path = path
        self.nbytes = nbytes
        self.arena_id = arena_id
        self.slot = slot
        self._fd = fd
        self._threads = threading.Lock()  # between threads of one process a file lock locks nothing
        # Through a descriptor of its own: the mapping keeps a copy of it, and with it whatever locks it has.
        other = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            mapped = mmap.mmap(other, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            raise _refused(path, f"it cannot be mapped ({os.strerror(error.errno or 0)})") from None
        finally:
            os.close(other)
        self.body = memoryview(mapped)[HEADER_BYTES:]

    @classmethod
    def create(cls, path: Path | str, nbytes: int) -> Self:
        """Makes a region and allocates all of it. Takes a second or two a GB.

        Raises FileExistsError if anything is at `path`, and Unsupported ARENA_NO_SPACE, with `needed` and `free` bytes,
        if the file system has not that much; then nothing is left there.
        """
        path = Path(path)
        if nbytes < MIN_BYTES:
            raise _refused(path, f"{nbytes} bytes are too few for an arena", needed=MIN_BYTES, given=nbytes)
        fd, slot = _begin(path)
        try:
            os.pwrite(fd, _UNFINISHED, 0)
            _allocate(path, fd, nbytes)
            arena_id = secrets.token_bytes(16)
            packed = _HEADER.pack(_MAGIC, _VERSION, HEADER_BYTES, nbytes, arena_id)
            os.pwrite(fd, packed[len(_MAGIC) :], len(_MAGIC))
            region = cls(path, fd, nbytes, arena_id, slot)
            os.pwrite(fd, _MAGIC, 0)  # last: with it others take the region for whole
        except BaseException:
            path.unlink(missing_ok=True)
            os.close(fd)
            raise
        return region

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Opens a region, and waits for one that is just being made.

        Raises Unsupported: ARENA_MISSING if there is none, ARENA_REFUSED for a file that is none of this version, has
        not the size that its header says, or is open to other users.
        """
        return cls._enter(Path(path), None)

    @classmethod
    def open_or_create(cls, path: Path | str, nbytes: int) -> Self:
        """Opens the region at `path`, of whatever size it is, or makes it of `nbytes`. Raises what both do."""
        return cls._enter(Path(path), nbytes)

    @classmethod
    def _enter(cls, path: Path, nbytes: int | None) -> Self:
        end = time.monotonic() + _PATIENCE
        while True:
            try:
                return cls._open(path)
            except FileNotFoundError:
                if nbytes is None:
                    raise Unsupported(
                        "ARENA_MISSING", f"there is no arena at {path}", facts={"path": str(path)}
                    ) from None
                try:
                    return cls.create(path, nbytes)
                except FileExistsError:
                    pass  # another was faster
            except _NotYet:
                _remove_if_dead(path, (b"", _UNFINISHED))
            if time.monotonic() > end:
                raise _refused(path, "another process has begun to make it and does not end")
            time.sleep(0.01)

    @classmethod
    def _open(cls, path: Path) -> Self:
        """Raises FileNotFoundError, and _NotYet for a file that is being made or being removed."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise _refused(path, f"it cannot be opened ({os.strerror(error.errno or 0)})") from None
        try:
            nbytes, arena_id = _read_header(path, fd)
            slot = _claim(fd)
            if slot is None or not _is_at(fd, path):
                raise _NotYet
            return cls(path, fd, nbytes, arena_id, slot)
        except BaseException:
            os.close(fd)
            raise

    def try_lock(self) -> bool:
        """Takes the one lock of the region, or says that another has it. It is held for moments; nobody waits here."""
        if not self._threads.acquire(blocking=False):
            return False
        try:
            taken = _lock(self._fd, _MUTEX)
        except BaseException:
            self._threads.release()
            raise
        if not taken:
            self._threads.release()
        return taken

    def unlock(self) -> None:
        _unlock(self._fd, _MUTEX)
        self._threads.release()

    def alive(self, slot: int) -> bool:
        """Whether a process holds a slot."""
        return slot == self.slot or _held_by_others(self._fd, _FIRST_SLOT + slot)

    def is_there(self) -> bool:
        """Whether its path still leads to it: who opens that now finds the same region."""
        return _is_at(self._fd, self.path)

    def unlink(self) -> None:
        """Takes the name away, if it is still this region's."""
        if _is_at(self._fd, self.path):
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Gives slot and lock back. The memory goes with the last view of `body`."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


def sweep(directory: Path | str) -> list[Path]:
    """Removes every region in a folder that no living process has open, and returns what was removed.

    One that was never finished is removed too. Files that are no region, and those of other users, are left alone.
    """
    return [path for path in sorted(Path(directory).iterdir()) if _remove_if_dead(path, (_MAGIC, _UNFINISHED))]


def _begin(path: Path) -> tuple[int, int]:
    """A new, empty file and this process's slot in it."""
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            raise
        except OSError as error:
            raise _refused(path, f"it cannot be made ({os.strerror(error.errno or 0)})") from None
        slot = _claim(fd)
        # Between the two lines above another may have taken the file for one of the dead.
        if slot is not None and _is_at(fd, path):
            return fd, slot
        os.close(fd)


def _allocate(path: Path, fd: int, nbytes: int) -> None:
    """Raises Unsupported ARENA_NO_SPACE."""
    space = os.statvfs(path.parent)
    free = space.f_bavail * space.f_frsize
    try:
        if nbytes > free:  # asked first, so that a file system is not filled to the brim in order to find out
            raise OSError(errno.ENOSPC, "")
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.ENOMEM, errno.EDQUOT):
            raise
        raise Unsupported(
            "ARENA_NO_SPACE",
            f"an arena of {nbytes} bytes does not fit into {path.parent}, which has {free} free: make it smaller "
            "(--arena-bytes) or give the container more shared memory (docker: --shm-size; Kubernetes: an emptyDir of "
            "medium Memory at /dev/shm)",
            facts={"needed": nbytes, "free": free, "path": str(path)},
        ) from None


def _read_header(path: Path, fd: int) -> tuple[int, bytes]:
    """Size and id of a whole region. Raises Unsupported ARENA_REFUSED, or _NotYet for one that is being made."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise _refused(path, "it is not a file")
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise _refused(path, f"it must be this user's alone (mode 0600, not {found.st_mode & 0o777:04o})")
    packed = os.pread(fd, _HEADER.size, 0)
    if not packed or packed.startswith(_UNFINISHED):
        raise _NotYet
    magic, version, header, nbytes, arena_id = _HEADER.unpack(packed.ljust(_HEADER.size, b"\0"))
    if magic != _MAGIC:
        raise _refused(path, "it is no arena")
    if (version, header) != (_VERSION, HEADER_BYTES):
        raise _refused(path, f"it is of version {version}, this is version {_VERSION}", got=version, needed=_VERSION)
    if nbytes != found.st_size or nbytes < MIN_BYTES:
        raise _refused(
            path, f"its header says {nbytes} bytes, it has {found.st_size}", got=found.st_size, needed=nbytes
        )
    return nbytes, arena_id


def _refused(path: Path, why: str, **facts: int) -> Unsupported:
    return Unsupported("ARENA_REFUSED", f"the arena {path} cannot be used: {why}", facts={"path": str(path), **facts})


def _remove_if_dead(path: Path, kinds: tuple[bytes, ...]) -> bool:
    """Removes a file of this user that begins as one of `kinds` and that nobody holds a slot of."""
    try:
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            return False
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False  # it is out of reach, or has gone meanwhile
    try:
        # While all slots are held here nobody else can come in, and nobody else can remove it.
        dead = os.pread(fd, len(_MAGIC), 0) in kinds and _lock(fd, _FIRST_SLOT, SLOTS) and _is_at(fd, path)
        if dead:
            path.unlink()
        return dead
    finally:
        os.close(fd)


def _is_at(fd: int, path: Path) -> bool:
    """Whether a name still is that of an open file."""
    mine = os.fstat(fd)
    try:
        there = path.lstat()
    except FileNotFoundError:
        return False
    return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)


def _claim(fd: int) -> int | None:
    """The lowest slot that is free, which is then this process's."""
    return next((slot for slot in range(SLOTS) if _lock(fd, _FIRST_SLOT + slot)), None)


def _lock(fd: int, start: int, length: int = 1) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0))
    except (BlockingIOError, PermissionError):  # EAGAIN or EACCES: another has it
        return False
    return True


def _unlock(fd: int, start: int) -> None:
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, start, 1, 0))


def _held_by_others(fd: int, start: int) -> bool:
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, 1, 0)
    kind = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))[0]
    return bool(kind != fcntl.F_UNLCK)
