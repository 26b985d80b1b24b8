"""The file of a Unix socket: gRPC puts its own in the place of any that is there, be it dead or alive. This asks first.

It knows files and sockets, and nothing of gRPC.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from typing import Final

MAX_PATH: Final = 107
"""Bytes of a socket's path, at most (unix(7): sun_path holds 108, the last is 0)."""

_PATIENCE = 1.0


class SocketFile:
    """One path to listen on. Connecting to it takes the right to write the file, which only its owner has."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._inode: int | None = None

    def clear(self) -> None:
        """Makes way: removes a socket on which nobody listens any more.

        Raises:
            OSError: EADDRINUSE for a process that listens there, EEXIST for a file that is no socket, ENAMETOOLONG,
                ENOENT for a folder that is not there.
        """
        if len(os.fsencode(self.path)) > MAX_PATH:
            raise OSError(errno.ENAMETOOLONG, f"the path of a socket has at most {MAX_PATH} bytes", self.path)
        try:
            mode = os.lstat(self.path).st_mode
        except FileNotFoundError:
            folder = os.path.dirname(self.path) or "."
            if not os.path.isdir(folder):
                raise FileNotFoundError(errno.ENOENT, "there is no such folder", folder) from None
            return
        if not stat.S_ISSOCK(mode):
            raise FileExistsError(errno.EEXIST, "a file is there that is no socket", self.path)
        with socket.socket(socket.AF_UNIX) as knock:
            knock.settimeout(_PATIENCE)
            try:
                knock.connect(self.path)
            except ConnectionRefusedError:
                os.unlink(self.path)
                return
            except TimeoutError:
                pass  # its queue is full, so somebody lives
        raise OSError(errno.EADDRINUSE, "another process listens there", self.path)

    def take(self) -> None:
        """Keeps others out of the socket that was just made at the path."""
        os.chmod(self.path, stat.S_IRUSR | stat.S_IWUSR)
        self._inode = os.lstat(self.path).st_ino

    def remove(self) -> None:
        """Removes the socket that was taken, if it is still there. May be called twice."""
        try:
            if os.lstat(self.path).st_ino == self._inode:
                os.unlink(self.path)
        except FileNotFoundError:
            pass
