"""A process that other processes are forked from, for tests that stop or kill one in the middle of a put.

    python -m tests.cache.forking ARENA

A line `STEP SIGNAL NAME SIZE` on standard input forks a process which opens the arena, puts an entry under that name,
pinned, and is sent the signal at that step. The answer is `PID SIGNAL`: what it died of or was stopped by, or 0 if the
put came to its end. Forked, because importing what an entry needs takes seconds, and each has an opening of its own.
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


def main() -> None:
    path = sys.argv[1]
    print("there", flush=True)  # noqa: T201 - it is spoken to by lines
    for line in sys.stdin:
        step, number, name, size = line.split()
        child = os.fork()
        if not child:
            _put(path, step, int(number), name, int(size))
            os._exit(0)
        _, status = os.waitpid(child, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            told = signal.SIGSTOP.value
        else:
            told = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        print(child, told, flush=True)  # noqa: T201
    while True:  # a stopped one was killed by the test
        try:
            os.wait()
        except ChildProcessError:
            return


if __name__ == "__main__":
    main()
