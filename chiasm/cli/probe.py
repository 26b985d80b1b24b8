"""What a probe asks about. A module of its own: the command line names it before it loads gRPC."""

from __future__ import annotations

from enum import StrEnum


class Service(StrEnum):
    """Whether calls are welcome, or whether the process works at all."""

    READINESS = "readiness"
    LIVENESS = "liveness"
