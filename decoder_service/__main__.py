"""`python -m decoder_service`: one decoder as a process. See `chiasm.rpc.process` for its life.

Importing torch takes seconds. What can be refused without it is refused before.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from chiasm.rpc.process import Process, run
from decoder_service.settings import DecoderSettings


@asynccontextmanager
async def serve(settings: DecoderSettings, process: Process) -> AsyncIterator[None]:
    served = await asyncio.to_thread(_imported)
    async with served(settings, process):
        yield


def _imported() -> Callable[[DecoderSettings, Process], AbstractAsyncContextManager[None]]:
    from decoder_service import serving

    return serving.serve


if __name__ == "__main__":
    run("decoder", DecoderSettings, serve)
