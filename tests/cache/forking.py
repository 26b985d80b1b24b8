"""A process that other processes are forked from, for tests that stop or kill one in the middle of a put.

    python -m tests.cache.forking

A line `STEP SIGNAL NAME SIZE ARENA` on standard input forks a process which opens the arena, puts an entry under that
name, pinned, and is sent the signal at that step. The answer is `PID SIGNAL`: what it died of or was stopped by, or 0
if the put came to its end. Forked, because importing what an entry needs takes seconds, and each has an opening of its
own.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from chiasm.cache.arena import ArenaStore
from chiasm.cache.region import Region
from chiasm.cache.store import Lease
from tests.cache.arenas import at, dies, entry, key


def _put(path: str, step: str, number: int, name: str, size: int) -> None:
    store = ArenaStore(Region.open(path), step=at(step, dies(number)))
    asyncio.run(store.put(entry(size, 99), key(name), lease=Lease.of(3600)))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    _say("there")
    for line in sys.stdin:
        step, number, name, size, path = line.split()
        child = os.fork()
        if not child:
            _put(path, step, int(number), name, int(size))
            os._exit(0)
        _, status = os.waitpid(child, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            told = signal.SIGSTOP.value
        else:
            told = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        _say(f"{child} {told}")
    while True:  # a stopped one was killed by the test
        try:
            os.wait()
        except ChildProcessError:
            return


if __name__ == "__main__":
    main()
