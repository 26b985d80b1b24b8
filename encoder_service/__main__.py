"""`python -m encoder_service`: one encoder as a process. See `chiasm.rpc.process` for its life.

Importing torch takes seconds. What can be refused without it is refused before.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from chiasm.rpc.process import Process, run
from encoder_service.settings import EncoderSettings


@asynccontextmanager
async def serve(settings: EncoderSettings, process: Process) -> AsyncIterator[None]:
    served = await asyncio.to_thread(_imported)
    async with served(settings, process):
        yield


def _imported() -> Callable[[EncoderSettings, Process], AbstractAsyncContextManager[None]]:
    from encoder_service import serving

    return serving.serve


if __name__ == "__main__":
    run("encoder", EncoderSettings, serve)
