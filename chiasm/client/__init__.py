"""The SDK: what a program imports to ask a model about images and videos.

`Client` and `AsyncClient` have the same calls, over a socket or in this process. Requests and results are frozen
dataclasses, failures are the classes of `chiasm.errors`, and protobuf stays inside. Nothing here loads torch or a
decoder of media, and gRPC only when a client is opened.
"""

from __future__ import annotations

from chiasm.client.async_client import AsyncClient
from chiasm.client.client import Client
from chiasm.client.connection import TLS
from chiasm.client.events import (
    Conditioning,
    Embedding,
    Estimate,
    Event,
    Finished,
    FramesVisible,
    Generation,
    MediaEstimate,
    MediaUsage,
    ModelInfo,
    StageTimes,
    Started,
    TimelineFrame,
    Token,
    TokenLogprobs,
    Usage,
)
from chiasm.client.media import Frames, Handle, Image, Video
from chiasm.client.stream import AsyncGenerationStream, GenerationStream
from chiasm.client.transport import InProcess, Opener, Transport
from chiasm.client.types import Content, Message, ResumePoint, SamplingParams

__all__ = [
    "TLS",
    "AsyncClient",
    "AsyncGenerationStream",
    "Client",
    "Conditioning",
    "Content",
    "Embedding",
    "Estimate",
    "Event",
    "Finished",
    "Frames",
    "FramesVisible",
    "Generation",
    "GenerationStream",
    "Handle",
    "Image",
    "InProcess",
    "MediaEstimate",
    "MediaUsage",
    "Message",
    "ModelInfo",
    "Opener",
    "ResumePoint",
    "SamplingParams",
    "StageTimes",
    "Started",
    "TimelineFrame",
    "Token",
    "TokenLogprobs",
    "Transport",
    "Usage",
    "Video",
]
