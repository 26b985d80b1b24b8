"""Workers behind channels: what the fleet protocol calls `EncoderCalls` and `DecoderCalls`, over gRPC.

Every failure comes out as a class of `chiasm.errors`. gRPC repeats nothing by itself here: the coordinator decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Final

import grpc.aio

from chiasm.errors import ConnectionFailed
from chiasm.rpc.call import answered, streamed
from chiasm.rpc.channel import connect
from chiasm.rpc.v1 import decoder_pb2 as dpb
from chiasm.rpc.v1 import decoder_pb2_grpc, encoder_pb2_grpc
from chiasm.rpc.v1 import encoder_pb2 as epb

REACH_SECONDS: Final = 2.0
"""A worker that does not take a connection within this time is not asked."""


class _Remote:
    """A channel to one worker."""

    def __init__(self, target: str) -> None:
        self.target = target
        self._channel: grpc.aio.Channel = connect(target)

    async def reach(self) -> None:
        try:
            async with asyncio.timeout(REACH_SECONDS):
                await self._channel.channel_ready()
        except TimeoutError:
            raise ConnectionFailed("a worker takes no connection") from None
        except grpc.aio.UsageError:  # it was found to be gone, and its channel closed, since it was chosen
            raise ConnectionFailed("a worker is gone") from None

    async def close(self) -> None:
        await self._channel.close()


class RemoteEncoder(_Remote):
    """`EncoderCalls` over a channel.

    Args:
        target: as a channel takes it.
    """

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self._stub = encoder_pb2_grpc.EncoderStub(self._channel)

    async def info(self, *, timeout: float) -> epb.EncoderInfoResponse:  # noqa: ASYNC109 - it is the call's deadline
        """What the worker says of itself. Raises ChiasmError."""
        return await answered(self._stub.Info(epb.EncoderInfoRequest(), timeout=timeout))

    def encode(
        self, requests: AsyncIterator[epb.EncodeRequest], *, timeout: float | None = None
    ) -> AsyncGenerator[epb.EncodeResponse, None]:
        return streamed(self._stub.Encode(timeout=timeout), requests)


class RemoteDecoder(_Remote):
    """`DecoderCalls` over a channel.

    Args:
        target: as a channel takes it.
    """

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self._stub = decoder_pb2_grpc.DecoderStub(self._channel)

    async def info(self, *, timeout: float) -> dpb.DecoderInfoResponse:  # noqa: ASYNC109 - it is the call's deadline
        """What the worker says of itself. Raises ChiasmError."""
        return await answered(self._stub.Info(dpb.DecoderInfoRequest(), timeout=timeout))

    def decode(
        self, requests: AsyncIterator[dpb.DecodeRequest], *, timeout: float | None = None
    ) -> AsyncGenerator[dpb.DecodeResponse, None]:
        return streamed(self._stub.Decode(timeout=timeout), requests)
