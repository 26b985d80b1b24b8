"""The SDK: what a program imports to ask a model about images and videos.

`Client` and `AsyncClient` have the same calls. Requests and results are frozen dataclasses, failures are the classes of
`chiasm.errors`, and protobuf stays inside. Nothing here loads torch or a decoder of media.
"""

from __future__ import annotations

from chiasm.client.client import AsyncClient, Client
from chiasm.client.events import (
    Event,
    Finished,
    FramesVisible,
    Generation,
    MediaUsage,
    ModelInfo,
    StageTimes,
    Started,
    TimelineFrame,
    Token,
    Usage,
)
from chiasm.client.stream import AsyncGenerationStream, GenerationStream
from chiasm.client.transport import InProcess, Opener, Transport
from chiasm.client.types import Content, Frames, Image, Message, SamplingParams, Video

__all__ = [
    "AsyncClient",
    "AsyncGenerationStream",
    "Client",
    "Content",
    "Event",
    "Finished",
    "Frames",
    "FramesVisible",
    "Generation",
    "GenerationStream",
    "Image",
    "InProcess",
    "MediaUsage",
    "Message",
    "ModelInfo",
    "Opener",
    "SamplingParams",
    "StageTimes",
    "Started",
    "TimelineFrame",
    "Token",
    "Transport",
    "Usage",
    "Video",
]
