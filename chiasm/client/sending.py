"""Media on their way beside the request that names them: the server reads them as they come.

Knows transports and uploads, no events.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from chiasm.client.transport import Metadata, Transport
from chiasm.client.upload import Upload
from chiasm.errors import StatusError
from chiasm.rpc.v1.router_pb2 import UploadResponse

GRACE = 0.25
"""Seconds that are waited for the word about an upload once the request that reads it has failed."""


@asynccontextmanager
async def sending(
    transport: Transport,
    uploads: Sequence[Upload],
    timeout: float | None,  # noqa: ASYNC109 - that of the request
    metadata: Metadata,
) -> AsyncIterator[None]:
    """Sends media while the block asks for what names them: the server reads them as they come.

    What goes wrong with one of them ends the block, and is raised in place of what it did to the request.
    """
    if not uploads:
        yield
        return
    tasks: list[asyncio.Task[UploadResponse]] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks += [group.create_task(send(transport, upload, timeout, metadata)) for upload in uploads]
            try:
                yield
            except StatusError as error:
                if error.reason == "UPLOAD_PROTOCOL":
                    # The request heard of a broken upload before its sender does.
                    await asyncio.wait(tasks, timeout=GRACE, return_when=asyncio.FIRST_EXCEPTION)
                raise
            finally:
                for task in tasks:
                    task.cancel()
    except BaseExceptionGroup as several:
        failed = [task.exception() for task in tasks if not task.cancelled()]
        cause = next((fault for fault in failed if fault is not None), several.exceptions[0])
        raise cause from cause.__cause__


async def send(
    transport: Transport,
    upload: Upload,
    timeout: float | None,  # noqa: ASYNC109 - that of the call
    metadata: Metadata,
) -> UploadResponse:
    """Sends one medium. Errors name its place in the request that it belongs to."""
    try:
        response = await transport.upload(upload.requests(), timeout=timeout, metadata=metadata)
        upload.check(response)
    except StatusError as error:
        if upload.item is None:
            raise
        raise error.at(upload.item) from error.__cause__
    return response
