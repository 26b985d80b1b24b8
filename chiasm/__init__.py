"""Chiasm: disaggregated serving for vision-language models.

`import chiasm` is light: the SDK is loaded when a name of it is first used, torch never by this package alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chiasm.client import (
        AsyncClient,
        AsyncGenerationStream,
        Client,
        Finished,
        Frames,
        FramesVisible,
        Generation,
        GenerationStream,
        Image,
        MediaUsage,
        Message,
        SamplingParams,
        Started,
        TimelineFrame,
        Token,
        Usage,
        Video,
    )

__version__ = "0.1.0"

__all__ = [
    "AsyncClient",
    "AsyncGenerationStream",
    "Client",
    "Finished",
    "Frames",
    "FramesVisible",
    "Generation",
    "GenerationStream",
    "Image",
    "MediaUsage",
    "Message",
    "SamplingParams",
    "Started",
    "TimelineFrame",
    "Token",
    "Usage",
    "Video",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name in __all__:
        import chiasm.client

        return getattr(chiasm.client, name)
    raise AttributeError(f"module 'chiasm' has no attribute {name!r}")
