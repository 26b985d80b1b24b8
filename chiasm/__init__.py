"""Chiasm: disaggregated serving for vision-language models.

`import chiasm` is light: the SDK and the errors are loaded when a name of them is first used, torch never by this
package alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chiasm.client import (
        TLS,
        AsyncClient,
        AsyncGenerationStream,
        Client,
        Estimate,
        Event,
        Finished,
        Frames,
        FramesVisible,
        Generation,
        GenerationStream,
        Handle,
        Image,
        MediaEstimate,
        MediaUsage,
        Message,
        ModelInfo,
        ResumePoint,
        SamplingParams,
        StageTimes,
        Started,
        TimelineFrame,
        Token,
        TokenLogprobs,
        Usage,
        Video,
    )
    from chiasm.errors import (
        AuthenticationFailed,
        Cancelled,
        CheckpointError,
        ChiasmError,
        ConnectionFailed,
        DeadlineExceeded,
        IdleTimeout,
        InvalidRequest,
        NotFound,
        Overloaded,
        PermissionDenied,
        ServerError,
        StatusError,
        Unavailable,
        Unsupported,
    )

__version__ = "0.1.0"

__all__ = [
    "TLS",
    "AsyncClient",
    "AsyncGenerationStream",
    "AuthenticationFailed",
    "Cancelled",
    "CheckpointError",
    "ChiasmError",
    "Client",
    "ConnectionFailed",
    "DeadlineExceeded",
    "Estimate",
    "Event",
    "Finished",
    "Frames",
    "FramesVisible",
    "Generation",
    "GenerationStream",
    "Handle",
    "IdleTimeout",
    "Image",
    "InvalidRequest",
    "MediaEstimate",
    "MediaUsage",
    "Message",
    "ModelInfo",
    "NotFound",
    "Overloaded",
    "PermissionDenied",
    "ResumePoint",
    "SamplingParams",
    "ServerError",
    "StageTimes",
    "Started",
    "StatusError",
    "TimelineFrame",
    "Token",
    "TokenLogprobs",
    "Unavailable",
    "Unsupported",
    "Usage",
    "Video",
    "__version__",
]

_ERRORS = frozenset(
    {
        "AuthenticationFailed",
        "Cancelled",
        "CheckpointError",
        "ChiasmError",
        "ConnectionFailed",
        "DeadlineExceeded",
        "IdleTimeout",
        "InvalidRequest",
        "NotFound",
        "Overloaded",
        "PermissionDenied",
        "ServerError",
        "StatusError",
        "Unavailable",
        "Unsupported",
    }
)


def __getattr__(name: str) -> object:
    if name in __all__:
        return getattr(importlib.import_module("chiasm.errors" if name in _ERRORS else "chiasm.client"), name)
    raise AttributeError(f"module 'chiasm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
