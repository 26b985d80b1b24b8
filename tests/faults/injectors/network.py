"""Networks of a test's own: two namespaces and a cable between them, which can be pulled, or carry one way only.

It takes root, iproute2 and util-linux; elsewhere tests that need it are skipped. Nothing of it has a name on the
machine: a namespace is that of a process that sleeps, and ends with it, and the cable with either. A socket file is
reached from every namespace, so a router in one has workers outside.
"""

from __future__ import annotations

import ctypes
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Final, TypeVar

import pytest

from tests.faults.injectors import needed, proved

T = TypeVar("T")

_CLONE_NEWNET: Final = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


class Namespace:
    """A network namespace with an address of its own."""

    def __init__(self, pid: int, address: str) -> None:
        self.pid = pid
        self.address = address

    @property
    def within(self) -> list[str]:
        """What a command line begins with that runs in it."""
        return [needed("nsenter"), f"--net=/proc/{self.pid}/ns/net", "--"]

    def ip(self, *arguments: str) -> str:
        command = [*self.within, needed("ip"), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def call(self, function: Callable[[], T]) -> T:
        """Calls a function in a thread that is in the namespace: the sockets that it makes are there."""
        results: list[T] = []
        failed: list[BaseException] = []

        def enter() -> None:
            try:
                with open(f"/proc/{self.pid}/ns/net") as there:
                    if _libc.setns(there.fileno(), _CLONE_NEWNET):
                        raise OSError(ctypes.get_errno(), "setns")
                results.append(function())
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        if failed:
            raise failed[0]
        return results[0]

    def reaches(self, address: str, port: int, *, seconds: float = 0.5) -> bool:
        """Whether a connection can be made from here."""

        def connect() -> bool:
            with suppress(OSError), socket.create_connection((address, port), timeout=seconds):
                return True
            return False

        return self.call(connect)

    def received(self) -> int:
        """Packets that came over the cable."""
        return self.call(lambda: _received("cable"))


def _received(device: str) -> int:
    with open("/proc/thread-self/net/dev") as table:
        for line in table:
            name, _, numbers = line.partition(":")
            if name.strip() == device:
                return int(numbers.split()[1])
    raise AssertionError(f"there is no {device}")


@contextmanager
def cabled() -> Iterator[tuple[Namespace, Namespace]]:
    """Two namespaces with a cable between them. Skips the test where they cannot be made."""
    unshare, ip = needed("unshare"), needed("ip")
    with ExitStack() as stack:
        made = []
        for address in ("10.213.0.1", "10.213.0.2"):
            sleeper = subprocess.Popen(
                [unshare, "--net", "--", "sh", "-c", "echo made; exec sleep 3600"],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            stack.callback(_end, sleeper)
            assert sleeper.stdout is not None
            if not sleeper.stdout.readline():
                pytest.skip("no network namespace can be made here")
            made.append(Namespace(sleeper.pid, address))
        one, other = made
        joined = subprocess.run(
            [*one.within, ip, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", str(other.pid)],
            capture_output=True,
            text=True,
            check=False,
        )
        if joined.returncode:
            pytest.skip(f"no veth can be made here: {joined.stderr.strip()}")
        for namespace in made:
            namespace.ip("addr", "add", f"{namespace.address}/24", "dev", "cable")
            namespace.ip("link", "set", "cable", "up")
            namespace.ip("link", "set", "lo", "up")
        yield one, other


def _end(sleeper: subprocess.Popen[bytes]) -> None:
    assert sleeper.stdout is not None
    sleeper.kill()
    sleeper.wait(10)
    sleeper.stdout.close()


class Unplug:
    """The cable of a namespace is pulled: nothing comes, nothing goes, and nobody is told.

    Args:
        port: somebody listens on it in `other`, so that it is seen whether the cable carries.
    """

    def __init__(self, namespace: Namespace, other: Namespace, port: int) -> None:
        self._namespace = namespace
        self._other = other
        self._port = port

    def inject(self) -> None:
        proved(self._reaches(), "there was no cable")
        self._namespace.ip("link", "set", "cable", "down")

    def verify(self) -> None:
        proved(not self._reaches(), "the cable carries")

    def end(self) -> None:
        self._namespace.ip("link", "set", "cable", "up")
        proved(self._reaches(), "the cable stays pulled")

    def _reaches(self) -> bool:
        return self._namespace.reaches(self._other.address, self._port)


class OneWay:
    """What a namespace sends to the other is dropped on its way out; what is sent to it arrives.

    Args:
        port: somebody listens on it in `deaf`, whose answers are what is dropped.
    """

    def __init__(self, deaf: Namespace, other: Namespace, port: int) -> None:
        self._deaf = deaf
        self._other = other
        self._port = port

    def inject(self) -> None:
        proved(self._answered(), "there was no cable")
        self._deaf.ip("route", "add", "blackhole", f"{self._other.address}/32")

    def verify(self) -> None:
        before = self._deaf.received()
        proved(not self._answered(), "answers come")
        proved(self._deaf.received() > before, "nothing arrives either")

    def end(self) -> None:
        with suppress(subprocess.CalledProcessError):
            self._deaf.ip("route", "del", "blackhole", f"{self._other.address}/32")
        proved(self._answered(), "answers are still dropped")

    def _answered(self) -> bool:
        return self._other.reaches(self._deaf.address, self._port)


class Loss:
    """A share of the packets that come to a namespace are dropped, by nftables, which counts them.

    `verify` is for when something was sent to it.
    """

    def __init__(self, namespace: Namespace, percent: int) -> None:
        self._namespace = namespace
        self._percent = percent

    def inject(self) -> None:
        self._nft("add", "table", "inet", "faults")
        self._nft("add", "chain", "inet", "faults", "coming", "{ type filter hook input priority 0; }")
        self._nft("add", "rule", "inet", "faults", "coming", "iifname", "cable", "numgen", "random", "mod", "100", "<",
                  str(self._percent), "counter", "drop")  # fmt: skip

    @property
    def dropped(self) -> int:
        """Packets."""
        words = self._nft("list", "chain", "inet", "faults", "coming").split()
        return int(words[words.index("packets") + 1])

    def verify(self) -> None:
        proved(self.dropped, "no packet was dropped")

    def end(self) -> None:
        self._nft("delete", "table", "inet", "faults")

    def _nft(self, *arguments: str) -> str:
        command = [*self._namespace.within, needed("nft"), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
